"""The endpoint's own thread fails in a real rank: the engine container ends at once, nothing is left over."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_kit import await_end, launch

pytestmark = pytest.mark.nixl

BREAKER = """
import sys, threading, time
from pathlib import Path

def watch():
    while not Path({trigger!r}).exists():
        time.sleep(0.05)
    agent = sys.modules.get("pdtransfer.agent.nixl")
    if agent is not None:
        def progress(self):
            raise MemoryError("injected: the agent is broken")
        agent.NixlAgent.progress = progress

threading.Thread(target=watch, daemon=True).start()
"""
"""A sitecustomize of the engine's processes: breaks the agent of every rank once a file is there."""


def test_a_failed_endpoint_thread_ends_the_engine_and_every_rank(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = tmp_path / "now"
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BREAKER.format(trigger=str(trigger)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    engine = launch(
        model,
        tmp_path / "log",
        *("--disaggregation-mode", "prefill", "--tp-size", "2", "--peers-file", str(tmp_path / "cards")),
    )
    pids = [rank["pid"] for rank in engine.info()["ranks"]]
    trigger.touch()
    assert engine.process.wait(60) == 1  # nobody asked it to end: it would go on for ever
    text = engine.log.read_text()
    assert "the transfer endpoint failed" in text and "injected: the agent is broken" in text
    await_end(pids)
