"""The operator's proof by a real request, with real SGLang and its own NIXL backend.

On a CPU that backend works at equal TP, with the test plugin that names the memory kind (test_real_tokens.py proves a
pair that works). At TP 2 -> 1 prefill's bootstrap thread ends with an exception while both servers' /health stays
green: what the proof is for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kit_model import make_model
from kit_pair import NIXL_DRAM, pair
from kit_probe import end, probe
from kit_server import Setting

from pdoperator.api.conditions import Reason
from pdoperator.domain.realprobe import ProbeOutcome, Unit, remember
from pdoperator.domain.realproof import prove
from pdoperator.domain.settings import DecideSettings

pytestmark = pytest.mark.timeout(3600)


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
