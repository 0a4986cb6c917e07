"""The whole data plane as in a pod, without containers: engines behind real sidecars, wired by rosters that
the test PUTs as the operator does; then a restart in place, and a drain."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pod_kit import Pod, ask, rooms, start_engine, start_pod, until, wire
from prometheus_client.parser import text_string_to_metric_families
from reference_kit import Truth, await_healthy

pytestmark = pytest.mark.nixl


@pytest.fixture
def pods(model: Path, tmp_path: Path) -> Iterator[tuple[Pod, Pod]]:
    pair = start_pod("prefill", 1, tmp_path / "p", model), start_pod("decode", 2, tmp_path / "d", model)
    try:
        for pod in pair:
            await_healthy(pod.engine)
        yield pair
    finally:
        for pod in pair:
            pod.stop()


def scraped(pod: Pod, name: str, **labels: str) -> float:
    """Sum of the series of one metric with these labels."""
    text = httpx.get(f"http://127.0.0.1:{pod.health}/metrics", timeout=20).text
    return sum(
        s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == f"pdtransfer_{name}" and labels.items() <= s.labels.items()
    )


def test_rosters_wire_the_pods_a_restart_is_a_new_incarnation_and_a_drain_ends_it(
    pods: tuple[Pod, Pod], truth: Truth
) -> None:
    prefill, decode = pods
    prompt, expected = truth.decided(40, 8)

    refused = decode.engine.generate(
        prompt, 8, bootstrap_host="127.0.0.1", bootstrap_port=prefill.engine.bootstrap_port, bootstrap_room=1
    )
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "PeerNotRostered")

    wire(prefill, decode, 1)
    assert ask(prefill, decode, prompt, 8).json()["output_ids"] == expected
    verdicts = prefill.verdicts().verdicts
    assert len(verdicts) == 2 and all(v.bytes_moved > 0 and v.checksum_ok and v.emulated_vram for v in verdicts)

    # What the ranks measured is scraped at the sidecars: decode's two ranks got what prefill's one sent.
    until(lambda: scraped(decode, "transfers_total", outcome="succeeded") == 2, "decode's ranks report")
    until(lambda: scraped(prefill, "transfers_total", outcome="succeeded") == 1, "prefill's rank reports")
    sent, received = scraped(prefill, "bytes_total", direction="sent"), scraped(decode, "bytes_total", rank="0")
    received += scraped(decode, "bytes_total", rank="1")
    assert sent == received > 0 == scraped(decode, "bytes_total", direction="sent")
    assert scraped(decode, "transfer_seconds_count", role="decode") == 2
    # Gauges are set now and then, and told with the next report.
    until(lambda: scraped(prefill, "peers", state="Wired") == 2, "both peers are counted as wired")
    until(lambda: scraped(prefill, "inflight") == 0, "nothing is counted as in flight")

    # The sidecar alone dies and comes back: what is wired serves on, and the pod is ready again by
    # itself, with the roster it had.
    for pod in (prefill, decode):
        until(pod.ready, f"{pod.role} is ready")
    prefill.sidecar.kill()
    prefill.sidecar.wait(60)
    assert ask(prefill, decode, prompt, 8).json()["output_ids"] == expected
    prefill.restart_sidecar()
    until(prefill.ready, "ready after the sidecar's restart")
    assert (prefill.cards().roster_term, prefill.cards().roster_counter) == (1, 1)

    before = prefill.cards().incarnation
    ranks = [r["pid"] for r in prefill.engine.info()["ranks"]]
    os.kill(ranks[0], signal.SIGKILL)
    assert prefill.engine.process.wait(60) == 1
    until(lambda: not prefill.cards().cards, "a dead rank's card is gone")
    assert not prefill.ready()
    prefill.engine = start_engine("prefill", 1, prefill.folder, prefill.model)
    await_healthy(prefill.engine)
    until(lambda: prefill.cards().complete, "the new incarnation's card")
    assert prefill.cards().incarnation != before
    wire(prefill, decode, 2)
    prompt, expected = truth.decided(17, 8, seed=4)
    assert ask(prefill, decode, prompt, 8).json()["output_ids"] == expected

    assert httpx.post(f"{prefill.base}/v1/drain", timeout=20).status_code < 300
    until(lambda: prefill.engine.get("/ready").status_code == 503, "the engine obeys the sidecar's drain")
    drained = prefill.engine.generate(
        prompt, 8, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=next(rooms)
    )
    assert (drained.status_code, drained.json()["error"]["type"]) == (503, "Draining")
    assert prefill.engine.stop() == 0  # nothing is in flight: it does not wait for the drain's time, but ends by itself
