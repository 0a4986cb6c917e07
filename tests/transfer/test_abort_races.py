"""An abort by either side exactly before or after each frame of a transfer is handled, in each strategy. Whatever wins:
both ends end, success means every byte, pages that were given back are never written again, and the next request goes
through. Every case proves that its frame was there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_world import PAGES, Rank, World, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.session.api import Timeouts, TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
SMALL: dict[str, Any] = {"staging_slot_bytes": 1024, "staging_bytes": 4096}
"""Four slots: a request of 12 pages and 4 regions needs many."""
SRC, DST = list(range(1, 13)), list(range(13, 25))
AT_PREFILL = ("Request", "SlotGrant")
AT_DECODE = ("Started", "SlotsWanted", "SlotFilled", "Done")
STAGED_ONLY = ("SlotGrant", "SlotsWanted", "SlotFilled")


class Ambush:
    """Calls `strike` once, before or after one rank handles the `nth` frame of a kind for room 1."""

    def __init__(self, rank: Rank, kind: str, when: str, nth: int, strike: Callable[[], None]) -> None:
        self.struck = False
        hooks, core = rank.endpoint._wiring.hooks, rank.endpoint._core
        real = hooks.on_frame
        seen = [0]

        def on_frame(peer: Any, frame: Any) -> None:
            wanted = type(frame).__name__ == kind and getattr(frame, "room", None) == 1
            seen[0] += wanted
            if not wanted or seen[0] != nth or self.struck:
                real(peer, frame)
                return
            self.struck = True
            if when == "before":
                strike()  # queues the engine's call ...
                core.call(real, peer, frame)  # ... and the frame after it
            else:
                real(peer, frame)
                strike()

        hooks.on_frame = on_frame  # type: ignore[method-assign]


def cases() -> list[Any]:
    made = []
    for strategy, p, d in (("sliced", 1, 1), ("sliced", 1, 2), ("staged", 2, 1), ("staged", 1, 2), ("merge", 2, 1)):
        for kind in (*AT_PREFILL, *AT_DECODE):
            if kind in STAGED_ONLY and strategy == "sliced":
                continue
            if strategy != "sliced" and kind in ("Started",):
                continue
            for who in ("prefill", "decode"):
                for when in ("before", "after"):
                    nth = 3 if kind in STAGED_ONLY[:1] + STAGED_ONLY[2:] and when == "after" else 1
                    made.append(pytest.param(strategy, p, d, kind, nth, who, when))
    return made


@pytest.mark.parametrize(("strategy", "p", "d", "kind", "nth", "who", "when"), cases())
def test_an_abort_at_any_frame_ends_both_sides_and_loses_no_page(
    world: World, strategy: str, p: int, d: int, kind: str, nth: int, who: str, when: str
) -> None:
    forced = {} if p == d else {"strategy": strategy, **SMALL}
    prefill, decode = world.pair(p, d, **forced)
    for rank in prefill:
        rank.agent.faults.delay_polls = 3
    receivers: list[Any] = []
    senders: list[Any] = []
    asked = threading.Event()

    def strike() -> None:
        assert asked.wait(30)  # a frame may come before the engine holds every transfer
        for transfer in receivers if who == "decode" else senders:
            transfer.abort(f"{who} at {kind}")

    at = prefill[0] if kind in AT_PREFILL else decode[0]
    ambush = Ambush(at, kind, when, nth, strike)
    senders += [give(rank, 1, SRC) for rank in prefill]
    receivers += [ask(rank, 1, DST) for rank in decode]
    asked.set()
    ends = [t.wait(30) for t in (*receivers, *senders)]
    assert ambush.struck, f"{kind} number {nth} never came"
    assert set(ends) <= {SUCCESS, FAILED}, ends
    for rank, receiver in zip(decode, receivers, strict=True):
        if receiver.state is SUCCESS:
            assert rank.pool.holds(1, DST)
        else:
            assert "abort" in str(receiver.error).lower() or "gave up" in str(receiver.error), receiver.error
        assert until(lambda r=receiver: r.pages_releasable), "its pages never come back"
    settles(prefill, decode)
    # The pages are another request's from now on.
    for rank in decode:
        for array in rank.pool.arrays.values():
            array[:] = 0x5A5A
    again = [ask(rank, 2, DST) for rank in decode]
    for rank in prefill:
        give(rank, 2, SRC)
    assert [r.wait(30) for r in again] == [SUCCESS] * d, [r.error for r in again]
    for rank in decode:
        assert rank.pool.holds(2, DST)
        others = sorted(set(range(PAGES)) - set(DST))
        assert all((array[others] == 0x5A5A).all() for array in rank.pool.arrays.values()), "a late byte landed"
    settles(prefill, decode)


def gave_up(rank: Rank, room: int) -> bool:
    """Every request that this prefill rank got for an open room has failed; the room itself may have ended since."""
    held = rank.endpoint._source._rooms.open.get(room)
    return held is None or all(leg.error for leg in list(held.legs.values()))


def settles(prefill: list[Rank], decode: list[Rank]) -> None:
    """Nothing is in flight, in quarantine, lent or packed any more."""
    for rank in (*prefill, *decode):
        assert rank.endpoint.failed is None
        assert until(lambda r=rank: r.endpoint.inflight == 0), (rank.endpoint.card.role, rank.endpoint.inflight)
        assert rank.endpoint.counters["quarantined_bytes"] == 0
    for rank in decode:
        book = rank.endpoint._destination.intake.book
        assert until(lambda b=book: b.counts()["granted"] == 0), book.counts()


@pytest.mark.parametrize("strategy", ["sliced", "staged", "merge"])
def test_an_abort_while_writes_hang_keeps_what_they_may_hit_until_they_land(world: World, strategy: str) -> None:
    """Negative control of the races above: here a byte does land late, and only where it may."""
    quick = Timeouts(waiting=20, transfer=20, settle=0.3, connect=5, probe=20)
    prefill, (decode,) = world.pair(2, 1, strategy=strategy, timeouts=quick, **SMALL)
    for rank in prefill:
        rank.agent.faults.stall_all = True
    receiver = ask(decode, 1, DST)
    senders = [give(rank, 1, SRC) for rank in prefill]
    assert until(lambda: all(rank.agent.faults.seen for rank in prefill)), "a rank's writes do not hang"
    receiver.abort("retracted")
    assert receiver.wait(30) is FAILED
    in_place = strategy == "sliced"
    if in_place:
        time.sleep(0.2)
        assert not receiver.pages_releasable
    else:
        # Only slots can be hit: the pages are free once the sources' own scatters have ended.
        assert until(lambda: receiver.pages_releasable)
        for array in decode.pool.arrays.values():
            array[:] = 0x5A5A
        assert decode.endpoint.counters["quarantined_bytes"] > 0
    before = {k: v.copy() for k, v in decode.pool.arrays.items()}
    for rank in prefill:  # the abort is known there before a write ends, so that no send can succeed
        assert until(lambda r=rank: gave_up(r, 1))
    for rank in prefill:
        rank.agent.faults.stall_all = False
        assert world.hub.unstall(rank.agent.name) > 0
    assert until(lambda: receiver.pages_releasable)
    assert until(lambda: decode.endpoint.counters["quarantined_bytes"] == 0)
    changed = any(not np.array_equal(before[k], decode.pool.arrays[k]) for k in before)
    assert changed == in_place
    assert [s.wait(30) for s in senders] == [FAILED, FAILED]
    again = ask(decode, 2, DST)
    for rank in prefill:
        give(rank, 2, SRC)
    assert again.wait(30) is SUCCESS and decode.pool.holds(2, DST)
    assert prefill[0].endpoint.card.role is Role.PREFILL
