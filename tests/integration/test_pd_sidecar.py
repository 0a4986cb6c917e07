"""The whole data plane as in a pod, without containers: engines behind real sidecars, wired by rosters that
the test PUTs as the operator does; then a restart in place, and a drain."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from reference_kit import Running, Truth, await_healthy, free_port, launch

from pdtransfer.contract.card import PodCards
from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.roster import Roster, RosterKey
from pdtransfer.contract.verdict import PodVerdicts, VerdictState
from pdtransfer.engines.reference.tiny_model import make_tiny_model

pytestmark = pytest.mark.nixl
CLUSTER = "cluster-uid-1"
_rooms = itertools.count(5000)


def until(check: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """The first true value of `check()`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := check():
                return value
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


@dataclass
class Pod:
    """One pod's two processes."""

    role: str
    tp: int
    folder: Path
    model: Path
    control: int
    health: int
    sidecar: subprocess.Popen[bytes]
    engine: Running

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.control}"

    def cards(self) -> PodCards:
        return PodCards.model_validate_json(httpx.get(f"{self.base}/v1/cards", timeout=5).content)

    def verdicts(self) -> PodVerdicts:
        return PodVerdicts.model_validate_json(httpx.get(f"{self.base}/v1/verdicts", timeout=5).content)

    def wired(self) -> bool:
        found = self.verdicts().verdicts
        return bool(found) and all(v.state is VerdictState.WIRED for v in found)

    def ready(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.health}/readyz", timeout=5).status_code == 200

    def restart_sidecar(self) -> None:
        """Started again over what its predecessor left, as the kubelet does."""
        self.sidecar = start_sidecar(self.role, self.folder, self.control, self.health)

    def stop(self) -> None:
        self.engine.stop()
        self.sidecar.terminate()
        self.sidecar.wait(10)


def start_engine(role: str, tp: int, folder: Path, model: Path) -> Running:
    return launch(
        model,
        folder / f"engine-{time.monotonic_ns()}.log",
        *("--disaggregation-mode", role, "--tp-size", str(tp), "--kv-memory-kind", "vram-emulated"),
        *("--sidecar-socket", str(folder / "s.sock"), "--cluster-uid", CLUSTER, "--pod-uid", f"uid-{role}"),
        wait=False,
    )


def start_sidecar(role: str, folder: Path, control: int, health: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "pdtransfer.sidecar.main", "--insecure", "--role", role),
        *("--cluster-uid", CLUSTER, "--pod-uid", f"uid-{role}", "--socket", str(folder / "s.sock")),
        *("--control-port", str(control), "--health-host", "127.0.0.1", "--health-port", str(health)),
    ]
    with (folder / "sidecar.log").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))


def start_pod(role: str, tp: int, folder: Path, model: Path) -> Pod:
    folder.mkdir()
    control, health = free_port(), free_port()
    sidecar = start_sidecar(role, folder, control, health)
    return Pod(role, tp, folder, model, control, health, sidecar, start_engine(role, tp, folder, model))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


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


def wire(prefill: Pod, decode: Pod, counter: int) -> None:
    """What the operator does: collect whole cards, give each pod its roster, wait for every verdict."""
    cards = [
        until(lambda p=p: p.cards() if p.cards().complete else None, f"cards of {p.role}") for p in (prefill, decode)
    ]
    for pod, own, other in ((prefill, cards[0], cards[1]), (decode, cards[1], cards[0])):
        roster = Roster(
            cluster_uid=CLUSTER,
            pod_uid=own.pod_uid,
            incarnation=own.incarnation,
            key=RosterKey(term=1, counter=counter),
            peers={c.rank: peers_of(c, other.cards) for c in own.cards},
        )
        answer = httpx.put(f"{pod.base}/v1/roster", content=roster.model_dump_json(), timeout=5)
        assert answer.status_code < 300, answer.text
    incarnations = {c.incarnation for c in cards}
    for pod in (prefill, decode):
        until(
            lambda pod=pod: pod.wired() and {v.peer_incarnation for v in pod.verdicts().verdicts} <= incarnations,
            f"{pod.role} wired: {pod.verdicts()}",
        )


def ask(prefill: Pod, decode: Pod, prompt: list[int], new: int) -> httpx.Response:
    fields: dict[str, Any] = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.engine.bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(p.engine.generate, prompt, new, **fields) for p in (prefill, decode)]
        both[0].result()
        return both[1].result()


def scraped(pod: Pod, name: str, **labels: str) -> float:
    """Sum of the series of one metric with these labels."""
    text = httpx.get(f"http://127.0.0.1:{pod.health}/metrics", timeout=5).text
    return sum(
        s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == f"pdtransfer_{name}" and labels.items() <= s.labels.items()
    )


def test_rosters_wire_the_pods_a_restart_is_a_new_incarnation_and_a_drain_ends_it(
    pods: tuple[Pod, Pod], model: Path
) -> None:
    prefill, decode = pods
    truth = Truth(model)
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
    prefill.sidecar.wait(5)
    assert ask(prefill, decode, prompt, 8).json()["output_ids"] == expected
    prefill.restart_sidecar()
    until(prefill.ready, "ready after the sidecar's restart")
    assert (prefill.cards().roster_term, prefill.cards().roster_counter) == (1, 1)

    before = prefill.cards().incarnation
    ranks = [r["pid"] for r in prefill.engine.info()["ranks"]]
    os.kill(ranks[0], signal.SIGKILL)
    assert prefill.engine.process.wait(20) == 1
    until(lambda: not prefill.cards().cards, "a dead rank's card is gone")
    assert not prefill.ready()
    prefill.engine = start_engine("prefill", 1, prefill.folder, prefill.model)
    await_healthy(prefill.engine)
    until(lambda: prefill.cards().complete, "the new incarnation's card")
    assert prefill.cards().incarnation != before
    wire(prefill, decode, 2)
    prompt, expected = truth.decided(17, 8, seed=4)
    assert ask(prefill, decode, prompt, 8).json()["output_ids"] == expected

    assert httpx.post(f"{prefill.base}/v1/drain", timeout=5).status_code < 300
    until(lambda: prefill.engine.get("/ready").status_code == 503, "the engine obeys the sidecar's drain")
    drained = prefill.engine.generate(
        prompt, 8, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=next(_rooms)
    )
    assert (drained.status_code, drained.json()["error"]["type"]) == (503, "Draining")
    started = time.monotonic()
    assert prefill.engine.stop() == 0 and time.monotonic() - started < 12  # nothing is in flight: it waits for nothing
