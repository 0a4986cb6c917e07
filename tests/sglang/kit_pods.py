"""What is in a pod beside the engine: the sidecar, as a process on loopback, and rosters as the operator PUTs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from kit_machine import free_port, kill_session

from pdtransfer.contract.card import PodCards
from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.roster import Roster, RosterKey
from pdtransfer.contract.verdict import PodVerdicts, VerdictState

CLUSTER = "cluster-uid-1"
T = TypeVar("T")


def until(check: Callable[[], T | None], what: str, seconds: float = 60.0) -> T:
    """The first value of `check()` that is true."""
    end, last = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            if value := check():
                return value
        except httpx.TransportError as error:
            last = repr(error)
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what} {last}")


class Sidecar:
    """The sidecar of one pod, in clear (no certificates), with a unix socket for the engine's ranks."""

    def __init__(self, role: str, folder: Path, uid: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.role, self.uid, self.log = role, uid, folder / "sidecar.log"
        self._socket = folder / "s.sock"
        control, health = free_port(), free_port()
        self.control, self.health = f"http://127.0.0.1:{control}", f"http://127.0.0.1:{health}"
        command = [
            *(sys.executable, "-m", "pdtransfer.sidecar.main", "--insecure", "--role", role),
            *("--cluster-uid", CLUSTER, "--pod-uid", uid, "--socket", str(self._socket)),
            *("--control-port", str(control), "--health-host", "127.0.0.1", "--health-port", str(health)),
        ]
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ), start_new_session=True
            )

    def variables(self) -> tuple[tuple[str, str], ...]:
        """What the operator sets in the engine's container."""
        return (
            ("PDTRANSFER_SOCKET", str(self._socket)),
            ("PDCLUSTER_UID", CLUSTER),
            ("POD_UID", self.uid),
            ("POD_NAME", f"pod-{self.uid}"),
            ("PDCLUSTER_ROLE", self.role),
        )

    def cards(self) -> PodCards:
        """GET /v1/cards."""
        return PodCards.model_validate_json(httpx.get(f"{self.control}/v1/cards", timeout=5).content)

    def whole_cards(self) -> PodCards | None:
        """The cards once every rank has shown its own."""
        cards = self.cards()
        return cards if cards.complete else None

    def verdicts(self) -> PodVerdicts:
        """GET /v1/verdicts."""
        return PodVerdicts.model_validate_json(httpx.get(f"{self.control}/v1/verdicts", timeout=5).content)

    def ready(self) -> bool:
        """GET /readyz is 200: every rank is alive and wired."""
        return httpx.get(f"{self.health}/readyz", timeout=5).status_code == 200

    def put_roster(self, peers: PodCards, counter: int) -> None:
        """Name `peers` as the pods this one may exchange KV with."""
        own = until(self.whole_cards, f"cards of {self.role}: {self.log}")
        roster = Roster(
            cluster_uid=CLUSTER,
            pod_uid=own.pod_uid,
            incarnation=own.incarnation,
            key=RosterKey(term=1, counter=counter),
            peers={card.rank: peers_of(card, peers.cards) for card in own.cards},
        )
        answer = httpx.put(f"{self.control}/v1/roster", content=roster.model_dump_json(), timeout=5)
        assert answer.status_code < 300, answer.text

    def wired_to(self, incarnation: str) -> bool:
        """All its pairs are proven, and with this incarnation."""
        found = self.verdicts().verdicts
        return bool(found) and all(v.state is VerdictState.WIRED and v.peer_incarnation == incarnation for v in found)

    def stop(self) -> None:
        """Kill it."""
        kill_session(self._process)


def wire(prefill: Sidecar, decode: Sidecar, counter: int) -> None:
    """Each gets the other as its only peer; returns when both have proven all pairs."""
    cards = {s.uid: until(s.whole_cards, f"cards of {s.role}: {s.log}") for s in (prefill, decode)}
    for one, other in ((prefill, decode), (decode, prefill)):
        one.put_roster(cards[other.uid], counter)
    for one, other in ((prefill, decode), (decode, prefill)):
        until(
            lambda one=one, other=other: one.wired_to(cards[other.uid].incarnation or ""),  # type: ignore[misc]
            f"{one.role} wired: {one.verdicts()}",
        )
