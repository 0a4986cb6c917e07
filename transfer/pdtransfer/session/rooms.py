"""The prefill side's book of rooms: what the engine handed over, who asked, what is over. No decisions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pdtransfer.contract.card import RankCard
from pdtransfer.errors import TransferError
from pdtransfer.mover.jobs import Job
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.session.frames import Request, SlotFilled
from pdtransfer.session.transfers import Chunk, SendTransfer


@dataclass(eq=False)
class Leg:
    """One decode rank's request for one room. `deadline` (monotonic seconds) ends its wait for the
    engine."""

    peer: Peer
    card: RankCard
    """The peer's, with the agent that the request names."""
    request: Request
    deadline: float
    job: Job | None = None
    error: TransferError | None = None
    done: bool = False
    started: bool = False
    """Something was queued for it."""
    announce: bool = False
    """Decode is to be told so."""
    feeder: Any = None
    """Who feeds it (feeder.Feeder)."""
    stage: Any = None
    """What goes through slots (stager.Stage), while the leg is fed."""
    filled: dict[int, SlotFilled] = field(default_factory=dict)
    """By ticket: slots that were filled."""
    digest: str = ""
    """Of the bytes that were sent, when decode asked for it."""
    came: float = field(default_factory=time.monotonic)
    retry_until: float = 0.0
    """Decode aborted it: until then it may ask again, and the room goes on."""

    @property
    def fenced(self) -> bool:
        """Its destination's agent was destroyed: nothing of it can land."""
        return self.request.generation < self.peer.fenced

    @property
    def over(self) -> bool:
        """Nothing of it is posted or will be, as far as is known."""
        return self.done or (self.error is not None and (self.job is None or self.job.finished))


@dataclass(eq=False)
class Room:
    """What the engine handed over for one room, and who takes it."""

    sender: SendTransfer
    deadline: float
    chunks: list[Chunk] = field(default_factory=list)
    metadata: bytes | None = None
    legs: dict[PeerKey, Leg] = field(default_factory=dict)
    error: TransferError | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def strategy(self) -> str:
        """How unequal slices travel (the first leg's, where they differ)."""
        return next((leg.request.strategy for leg in self.legs.values()), "direct")

    @property
    def required(self) -> int:
        """Decode ranks that have to be served."""
        return max((leg.request.required for leg in self.legs.values()), default=1)


class Rooms:
    """Open rooms, requests that came before their room, and rooms that died before anyone asked."""

    def __init__(self) -> None:
        self.open: dict[int, Room] = {}
        self.pending: dict[int, dict[PeerKey, Leg]] = {}
        self.draining: set[Leg] = set()
        """Legs that ended with handles in flight, or with one that errored."""
        self._dead: dict[int, tuple[float, TransferError, int | None]] = {}

    def __len__(self) -> int:
        return len(self.open) + len(self.pending) + len(self.draining)

    def leg(self, number: int, key: PeerKey) -> Leg | None:
        """The leg of this peer that goes on."""
        room = self.open.get(number)
        if room is not None and key in room.legs and not room.legs[key].done:
            return room.legs[key]
        return self.pending.get(number, {}).get(key)

    def taker(self, number: int) -> Peer | None:
        """A rank of the decode engine that gets this room, if one does."""
        room = self.open.get(number)
        legs = (*(room.legs.values() if room is not None else ()), *self.pending.get(number, {}).values())
        return next((leg.peer for leg in legs if leg.error is None), None)

    def asked(self, number: int) -> tuple[Request, ...]:
        """What decode ranks asked of this room and may still get. From any thread: copies are made in one step."""
        room, waiting = self.open.get(number), self.pending.get(number)
        legs = (*(list(room.legs.values()) if room is not None else ()), *(list(waiting.values()) if waiting else ()))
        return tuple(leg.request for leg in legs if leg.error is None)

    def wait(self, leg: Leg) -> None:
        """Keep a request until the engine opens its room."""
        self.pending.setdefault(leg.request.room, {})[leg.peer.key] = leg

    def unwait(self, leg: Leg) -> None:
        """It waits no more."""
        legs = self.pending.get(leg.request.room, {})
        if legs.get(leg.peer.key) is leg:
            del legs[leg.peer.key]
            if not legs:
                del self.pending[leg.request.room]

    def uses(self, peer: Peer, generation: int) -> bool:
        """Something was asked for that agent of the peer and may still succeed."""
        legs = (*(leg for room in self.open.values() for leg in room.legs.values()), *self.waiting())
        return any(leg.peer is peer and leg.request.generation == generation and not leg.over for leg in legs)

    def waiting(self) -> Iterator[Leg]:
        """All requests whose room is not open."""
        return iter([leg for legs in self.pending.values() for leg in legs.values()])

    def bury(self, number: int, error: TransferError, keep: float, attempt: int | None = None) -> None:
        """The room failed before everyone asked: whoever asks within `keep` seconds is told. `attempt`: of
        those who had asked; a later one waits for the engine to send the room again."""
        self._dead[number] = (time.monotonic() + keep, error, attempt)

    def unbury(self, number: int) -> None:
        """The engine sends it again."""
        self._dead.pop(number, None)

    def death(self, number: int, attempt: int) -> TransferError | None:
        """Why the room died for this attempt."""
        found = self._dead.get(number)
        return found[1] if found is not None and (found[2] is None or attempt <= found[2]) else None

    def errored(self) -> list[Leg]:
        """Legs with a handle that errored after their job had ended (before that, the job's end told it)."""
        return [leg for leg in self.draining if leg.job is not None and leg.job.lost and not leg.fenced]

    def forget(self, peer: Peer) -> None:
        """The peer was let go: nothing more is heard of legs to it."""
        self.draining = {leg for leg in self.draining if leg.peer is not peer}

    def expire(self, now: float) -> None:
        """Drop old deaths."""
        self._dead = {n: d for n, d in self._dead.items() if d[0] >= now} if self._dead else self._dead
