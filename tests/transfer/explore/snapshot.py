"""The state of a world as one hashable value, and the deadlines it waits for.

The real objects are walked, whatever fields they have; what cannot change what follows (labels,
counters, addresses) is left out. Moments are taken relative to now."""

from __future__ import annotations

import enum
import types
from collections import deque
from typing import Any

import numpy as np
from pydantic import BaseModel

from pdtransfer.contract.card import RankCard
from pdtransfer.peers import Peer

from .actions import gate_name
from .virtual import EPOCH
from .world import World

_SKIPPED = """
_core _wiring _agent _lock _pool _card _config _hcas label metrics verdict tasks counters news transfer
sender connections prober verdicts hooks heard known_at probed_at posted_at _next_check _clock _serials
_attach _abandon on_finish on_drained message bytes_moved card peer agent local remote handle lists
_listeners make_agent asked_at _next_look _tried_at came began _depot _opener pair links _pairs pairs
_digests _told _turned _numbers rates _routes _known
"""
SKIP = frozenset(_SKIPPED.split())
"""Fields that cannot change what follows, and ways back to the whole."""
PLAIN = frozenset((int, str, bool, bytes, type(None)))
ROWS = frozenset((list, tuple, deque))
SETS = frozenset((set, frozenset))
INFINITE = float("inf")
LEAVES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, np.ndarray, type)


class _Walk:
    def __init__(self, now: float, apart: bool) -> None:
        self.now = now
        self.skip = SKIP if apart else SKIP | {"connect_by"}
        self.seen: dict[int, int] = {}
        self.moments: set[float] = set()

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is float:
            if value < EPOCH or value == INFINITE:
                return value
            self.moments.add(value)
            return ("at", round(value - self.now, 2))
        if kind is dict:
            if not value:
                return ()
            return frozenset([(self(k), self(v)) for k, v in value.items()])
        if kind in ROWS:
            return tuple([self(v) for v in value])
        if kind in SETS:
            return tuple(sorted([hash(self(v)) for v in value]))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, RankCard):
            return (value.pod_uid, value.rank, value.incarnation)
        if isinstance(value, BaseModel):
            return hash(value)
        if isinstance(value, BaseException):
            return type(value).__name__
        if isinstance(value, LEAVES) or not type(value).__module__.startswith("pdtransfer."):
            return type(value).__name__
        if isinstance(value, Peer):
            flags = (value.loaded, value.retired, value.ended_there, value.refused_since, value.dead, value.reload)
            # How long a connection is gone counts, since when one is there does not.
            gone = self(value.since) if value.channel is None else None
            agents = (value.card.generation, tuple([c.generation for c in value.older]), value.fenced, value.oldest)
            return ("peer", value.key, value.card.incarnation, flags, agents, value.channel is not None, gone)
        number = self.seen.get(id(value))
        if number is not None:
            return ("seen", number)
        self.seen[id(value)] = len(self.seen)
        fields = getattr(value, "__dict__", None)
        if fields is None:
            names = getattr(type(value), "__slots__", ())
            fields = {n: getattr(value, n, None) for n in names}
        return (type(value).__name__, *[self(v) for n, v in fields.items() if n not in self.skip])


def _task(task: Any) -> tuple[Any, ...]:
    """Where a coroutine stands: its frames and their numbers."""
    found = []
    at = task.get_coro()
    while at is not None and (frame := getattr(at, "cr_frame", None)) is not None:
        numbers = tuple([v for v in frame.f_locals.values() if type(v) is int])
        found.append((at.cr_code.co_name, frame.f_lasti, numbers))
        at = at.cr_await
    return tuple(found)


def _walked(world: World) -> tuple[_Walk, list[Any]]:
    # When every connection is there, the time until which one must come back is always moved on.
    apart = any(p.channel is None for r in world.living for p in r.endpoint._wiring._peers.values())
    apart = apart or any(r.endpoint._wiring._retired for r in world.living)
    walk = _Walk(world.loop.now, apart)
    parts: list[Any] = []
    for rank in world.living:
        endpoint, core = rank.endpoint, rank.core
        parts.append((rank.where, core.generations.present.number, core.generations.oldest))
        parts.append(tuple([(n, walk(v)) for n, v in endpoint.__dict__.items() if n not in SKIP]))
        parts.append((walk(core.mover), walk(endpoint._wiring._peers), walk(endpoint._wiring._retired)))
        parts.append(tuple(sorted([hash(_task(t)) for t in core._tasks if not t.done()])))
    return walk, parts


def fingerprint(world: World, budgets: bool = True) -> int:
    """Equal for worlds in which the same may follow; without `budgets`, in which the same may follow
    when nothing goes wrong any more."""
    walk, parts = _walked(world)
    pool = tuple(sorted([(m.label, m.receiver_end.closed_here, hash(m.frame), m.doubled) for m in world.network.pool]))
    flights = tuple([(f.number, f.state, f.leg, f.pages, f.slots, world.may_land(f)) for f in world.flights])
    receipts = tuple(
        [(r.rank.name, r.room, r.attempt, r.pages, r.transfer.state.value, r.freed, r.marked) for r in world.receipts]
    )
    receipts += tuple([(r.name, room) for r, room in world.refusals])
    sendings = tuple([(s.rank.name, s.sender.room, s.given, s.sender.state.value) for s in world.sendings])
    memory = (*[rank.memory.tobytes() for rank in world.decodes], world.arenas.read())
    gates = tuple(sorted([gate_name(world, g) for g in world.network.gates]))
    said = (hash(frozenset(world.settled)), hash(frozenset(world.done)))
    dead = tuple([(r.where, walk(r.died_at)) for r in world.old])
    used = (tuple(sorted(world.used.items())), world.lossy) if budgets else ()
    return hash((tuple(parts), pool, flights, receipts, sendings, memory, gates, said, dead, used))


def deadlines(world: World) -> list[float]:
    """Moments still to come at which something may happen by itself."""
    walk, _ = _walked(world)
    times = world.bounds.timeouts
    found = {*walk.moments, *world.loop.timers}
    for rank in world.living:
        wiring = rank.endpoint._wiring
        found |= {p.since + times.connect for p in wiring.known() if p.channel is None}
        found |= {since + wiring._deaths.patience for since in wiring._deaths._since.values()}
        # Moments from which the rotation counts: since when pages or slots wait, and its last failure.
        waiting = [r.failed_at for r in rank.endpoint._destination._settling.values()]
        found |= {at + age for at in waiting for age in (times.settle + times.connect, times.quarantine)}
    return [moment for moment in found if moment > world.loop.now]
