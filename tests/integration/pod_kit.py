"""Pods without containers: an engine behind a real sidecar, wired by rosters that are PUT as the operator does it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from reference_kit import Running, free_port, launch

from pdtransfer.contract.card import PodCards
from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.roster import Roster, RosterKey
from pdtransfer.contract.verdict import PodVerdicts, VerdictState

CLUSTER = "cluster-uid-1"
rooms = itertools.count(5000)
"""Bootstrap rooms: a new one for each request."""


def until(check: Callable[[], Any], what: str, seconds: float = 90) -> Any:
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
        return PodCards.model_validate_json(httpx.get(f"{self.base}/v1/cards", timeout=20).content)

    def verdicts(self) -> PodVerdicts:
        return PodVerdicts.model_validate_json(httpx.get(f"{self.base}/v1/verdicts", timeout=20).content)

    def wired(self) -> bool:
        found = self.verdicts().verdicts
        return bool(found) and all(v.state is VerdictState.WIRED for v in found)

    def ready(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.health}/readyz", timeout=20).status_code == 200

    def restart_sidecar(self) -> None:
        """Started again over what its predecessor left, as the kubelet does."""
        self.sidecar = start_sidecar(self.role, self.folder, self.control, self.health)

    def stop(self) -> None:
        self.engine.stop()
        self.sidecar.terminate()
        self.sidecar.wait(60)


def start_engine(role: str, tp: int, folder: Path, model: Path) -> Running:
    return launch(
        model,
        folder / f"engine-{time.monotonic_ns()}.log",
        *("--disaggregation-mode", role, "--tp-size", str(tp), "--kv-memory-kind", "vram-emulated"),
        *("--sidecar-socket", str(folder / "s.sock"), "--cluster-uid", CLUSTER, "--pod-uid", f"uid-{role}"),
        *("--drain-timeout", "300"),  # longer than stop() waits
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
        answer = httpx.put(f"{pod.base}/v1/roster", content=roster.model_dump_json(), timeout=20)
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
        "bootstrap_room": next(rooms),
    }
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(p.engine.generate, prompt, new, **fields) for p in (prefill, decode)]
        both[0].result()
        return both[1].result()
