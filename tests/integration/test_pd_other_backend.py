"""SGLang's own NIXL backend, emulated: peers meet on the bootstrap port without a roster, and what that backend
can not do is refused by the rule's name instead of killing a thread."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from reference_kit import Running, Truth, await_healthy, launch

from pdoperator.api.conditions import Reason
from pdoperator.cli import main as pdcluster
from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, Unit, remember
from pdoperator.domain.realproof import prove
from pdoperator.domain.settings import DecideSettings
from pdoperator.pods.engine_probe import EngineProber

pytestmark = pytest.mark.nixl
_rooms = itertools.count(7000)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running, Running]]:
    """Prefill TP 2, a decode TP 1 with device memory, a decode TP 1 with host memory."""
    folder = tmp_path_factory.mktemp("nixl")

    def start(role: str, tp: int, memory: str) -> Running:
        return launch(
            model,
            folder / f"{role}-{memory}.log",
            *("--disaggregation-mode", role, "--tp-size", str(tp), "--kv-memory-kind", memory),
            *("--disaggregation-transfer-backend", "nixl"),
            wait=False,
        )

    started = [start("prefill", 2, "vram-emulated"), start("decode", 1, "vram-emulated"), start("decode", 1, "dram")]
    try:
        for engine in started:
            await_healthy(engine)
        yield started[0], started[1], started[2]
    finally:
        codes = [e.stop() for e in started]
    assert codes == [0, 0, 0]


def ask(prefill: Running, decode: Running, prompt: list[int], new: int) -> httpx.Response:
    fields = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(prefill.generate, prompt, new, rid=str(fields["bootstrap_room"]), **fields)
        answer = decode.generate(prompt, new, **fields)
        while not sent.done():  # a router aborts the other side of a failed pair
            prefill.post("/abort_request", {"rid": str(fields["bootstrap_room"])})
            time.sleep(0.05)
    return answer


def test_peers_meet_on_the_bootstrap_port_and_answers_equal_transformers(
    engines: tuple[Running, Running, Running], truth: Truth
) -> None:
    prefill, decode, _ = engines
    for length in (7, 40):
        prompt, expected = truth.decided(length, 8)
        answer = ask(prefill, decode, prompt, 8)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == expected
    assert decode.info()["disaggregation_transfer_backend_emulated"] is True


def test_unequal_tp_into_host_memory_is_refused_by_the_rule_that_upstream_has(
    engines: tuple[Running, Running, Running],
) -> None:
    prefill, _, decode = engines
    started = time.monotonic()
    answer = ask(prefill, decode, [5, 6, 7], 2)
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["type"] == "PeerUnreachable" and "F3" in error["message"], error
    assert time.monotonic() - started < 25  # less than decode would wait


def test_a_bootstrap_address_where_nobody_listens_is_an_error_at_once(
    engines: tuple[Running, Running, Running],
) -> None:
    *_, decode = engines
    answer = decode.generate([5], 1, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=next(_rooms))
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "PeerUnreachable")


# The operator's proof by a real request, through these engines


def end(engine: Running, name: str) -> ProbeEnd:
    return ProbeEnd(name, f"uid-{name}", "127.0.0.1", port=engine.port)


async def probe(prefill: Running, decode: Running, deadline: float = 60.0) -> ProbeResult:
    told: asyncio.Queue[str] = asyncio.Queue()
    prober = EngineProber(bootstrap_port=prefill.bootstrap_port)
    prober.news = told.put_nowait
    try:
        prober.start("c", StartProbe(end(prefill, "p"), end(decode, "d"), deadline=deadline))
        await asyncio.wait_for(told.get(), deadline + 30)
        (result,) = prober.look("c").results
        return result
    finally:
        await prober.close()


async def test_the_operators_request_is_served_by_a_pair_that_works(
    engines: tuple[Running, Running, Running],
) -> None:
    prefill, decode, _ = engines
    for _ in range(2):
        result = await probe(prefill, decode)
        assert result.outcome is ProbeOutcome.SERVED, result.message


async def test_the_operators_request_fails_by_the_rules_name_where_the_backend_can_not_connect(
    engines: tuple[Running, Running, Running],
) -> None:
    prefill, decode, hosted = engines
    result = await probe(prefill, hosted)
    assert result.outcome is ProbeOutcome.FAILED
    assert "decode d answers HTTP 503" in result.message and "F3" in result.message
    # Neither engine is the worse for it.
    assert (await probe(prefill, decode)).outcome is ProbeOutcome.SERVED


async def test_a_prefill_that_stands_still_with_its_health_green_is_found_by_the_deadline(
    engines: tuple[Running, Running, Running],
) -> None:
    prefill, decode, _ = engines
    ranks = [r["pid"] for r in prefill.info()["ranks"]]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert prefill.get("/health").status_code == 200
        results = [await probe(prefill, decode, deadline=2.0) for _ in range(2)]
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    assert {r.outcome for r in results} == {ProbeOutcome.TIMED_OUT}
    unit = Unit(end(prefill, "p"), 0, 1, "r")
    history = remember({}, [replace(r, at=float(i + 1)) for i, r in enumerate(results)])
    proof = prove([unit], {"r": (end(decode, "d"),)}, history, DecideSettings())
    assert proof.reason is Reason.REQUEST_FAILED and "no answer of" in proof.failed
    # Both sides gave the requests up: the next one is served.
    assert (await probe(prefill, decode)).outcome is ProbeOutcome.SERVED


def test_preflight_reads_two_running_engines(
    engines: tuple[Running, Running, Running], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode, hosted = engines
    found = {}
    for name, other in (("fits", decode), ("hosted", hosted)):
        urls = ["--server", other.url, "--server", prefill.url]
        code = pdcluster(["preflight", *urls, "--model-config", str(model / "config.json"), "-o", "json"])
        out = json.loads(capsys.readouterr().out)
        found[name] = code, {f["rule"] for f in out["findings"] if f["status"] == "Fail"}
        assert (out["prefill"]["facts"]["engine"], out["prefill"]["facts"]["tensor_parallel"]) == ("Reference", 2)
    assert found == {"fits": (0, set()), "hosted": (1, {"F3"})}
