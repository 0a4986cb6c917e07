"""The operator's proof by a real request, with real SGLang and its own NIXL backend.

On a CPU that backend works at equal TP (with the test plugin that names the memory kind). At TP 2 -> 1 prefill's
bootstrap thread ends with an exception while both servers' /health stays green: what the proof is for."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kit_model import make_model
from kit_pair import NIXL_DRAM, Pair, pair
from kit_server import Server, Setting

from pdoperator.api.conditions import Reason
from pdoperator.cli import main as pdcluster
from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, Unit, remember
from pdoperator.domain.realproof import prove
from pdoperator.domain.settings import DecideSettings
from pdoperator.pods.engine_probe import EngineProber

pytestmark = pytest.mark.timeout(3600)


def end(server: Server) -> ProbeEnd:
    return ProbeEnd(server.setting.role, f"uid-{server.setting.role}", "127.0.0.1", port=server.port)


def probe(both: Pair, deadline: float) -> ProbeResult:
    async def once() -> ProbeResult:
        told: asyncio.Queue[str] = asyncio.Queue()
        prober = EngineProber(bootstrap_port=both.prefill.bootstrap_port)
        prober.news = told.put_nowait
        try:
            prober.start("c", StartProbe(end(both.prefill), end(both.decode), deadline=deadline))
            await asyncio.wait_for(told.get(), deadline + 30)
            (result,) = prober.look("c").results
            return result
        finally:
            await prober.close()

    return asyncio.run(once())


def test_a_pair_that_works_serves_the_request_and_preflight_reads_both_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model")
    with pair(Setting(model, "", backend=NIXL_DRAM), tmp_path, 1, 1) as both:
        result = probe(both, 120.0)
        assert result.outcome is ProbeOutcome.SERVED, result.message
        urls = ["--server", both.decode.url, "--server", both.prefill.url]
        code = pdcluster(["preflight", *urls, "--model-config", str(model / "config.json"), "-o", "json"])
        out = json.loads(capsys.readouterr().out)
    assert code == 0, [f for f in out["findings"] if f["status"] == "Fail"]
    facts = {role: out[role]["facts"] for role in ("prefill", "decode")}
    assert facts["prefill"]["route_registered"] is True
    assert [facts[r]["engine_version"] for r in facts] == ["0.5.23", "0.5.23"]
    assert [facts[r]["page_size"] for r in facts] == [16, 16]
    assert facts["decode"]["disable_radix_cache"] is True and facts["prefill"]["chunked_prefill_size"] == 64


def test_a_bootstrap_thread_that_ended_is_found_while_health_is_green(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with pair(Setting(model, "", backend=NIXL_DRAM), tmp_path, 2, 1) as both:
        since = both.prefill.said()
        results = [probe(both, 20.0) for _ in range(2)]
        # The fault happened: the thread's own exception is in prefill's output.
        both.prefill.await_output("NotImplementedError", since)
        assert both.prefill.healthy() and both.decode.healthy()
    assert {r.outcome for r in results} == {ProbeOutcome.TIMED_OUT}, [r.message for r in results]
    unit = Unit(end(both.prefill), 0, 1, "r")
    history = remember({}, [replace(r, at=float(i + 1)) for i, r in enumerate(results)])
    proof = prove([unit], {"r": (end(both.decode),)}, history, DecideSettings())
    assert proof.reason is Reason.REQUEST_FAILED
    assert "bootstrap thread" in proof.failed and "delete pod prefill" in proof.failed
