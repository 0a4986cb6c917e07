"""Rank processes over real NIXL, for tests: started, asked with JSON lines, wired, killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from asked_process import AskedProcess
from kv_world import PAGES

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of

SCRIPT = Path(__file__).with_name("rank_process.py")


class RankProcess(AskedProcess):
    """A rank process."""

    card: RankCard

    def __init__(
        self,
        role: str,
        tp: int,
        size: int,
        incarnation: str,
        memory: str,
        tls: str,
        ucx_tls: str,
        *,
        pages: int = PAGES,
        host: str = "",
        port: int = 0,
        devices: str = "",
        namespace: str = "",
        pod: str = "",
        options: dict | None = None,
    ) -> None:
        """`namespace` is a network namespace to run in; `host`, `port` and `devices` its address there."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "ERROR"}
        more = json.dumps(options) if options else ""
        given = {"HOST": host, "PORT": str(port or ""), "DEVICES": devices, "POD": pod, "OPTIONS": more}
        for name, value in given.items():
            env.pop(f"RANK_{name}", None)
            if value:
                env[f"RANK_{name}"] = value
        within = ["ip", "netns", "exec", namespace] if namespace else []
        if ucx_tls:
            env["UCX_TLS"] = ucx_tls
        env.pop("UCX_NET_DEVICES", None)
        command = [sys.executable, str(SCRIPT), role, str(tp), str(size), incarnation, memory, tls, str(pages)]
        super().__init__([*within, *command], env)


def stop(pid: int) -> None:
    """SIGSTOP, and every thread has stopped: on a busy machine one may go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 60
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < until, "it does not stop"
        time.sleep(0.001)


class Ranks:
    def __init__(self) -> None:
        self.all: list[RankProcess] = []

    def start(
        self,
        p: int,
        d: int,
        *,
        memory=("DRAM", "DRAM"),
        tls: str = "",
        ucx_tls: str = "",
        options: dict | None = None,
    ) -> tuple[list, list]:
        prefill = [RankProcess("prefill", t, p, "p1", memory[0], tls, ucx_tls, options=options) for t in range(p)]
        decode = [RankProcess("decode", t, d, "d1", memory[1], tls, ucx_tls, options=options) for t in range(d)]
        self.all = prefill + decode
        cards = [RankCard.model_validate_json(r.answer()["card"]) for r in self.all]
        for rank, card in zip(self.all, cards, strict=True):
            rank.card = card
            rank.tell("peers", cards=[c.model_dump_json() for c in peers_of(card, cards)])
        for rank in self.all:
            wired = rank.answer()
            assert wired["wired"], wired
        return prefill, decode


def released_by(decode: RankProcess, fence: str) -> bool:
    """One receive's pages were given back by that fence (it is counted just after they are free)."""
    until = time.monotonic() + 20
    while decode.ask("counters").get(f"quarantine_released{{fence={fence}}}") != 1:
        if time.monotonic() > until:
            return False
    return True
