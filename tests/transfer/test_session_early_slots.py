"""A first slot is lent with the request while much of the arena is free: a small request is spared a round trip."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from kv_world import Rank, World, ask, give, until

from pdtransfer.contract.base import MemoryKind
from pdtransfer.session.api import TransferState
from pdtransfer.session.slots import SlotBook

ONE_SLOT: dict[str, Any] = {"strategy": "staged", "staging_slot_bytes": 1 << 16, "staging_bytes": 8 << 16}


def heard(rank: Rank) -> Counter[str]:
    """Frames this rank handles from now on, by kind."""
    seen: Counter[str] = Counter()
    hooks = rank.endpoint._wiring.hooks
    real = hooks.on_frame

    def on_frame(peer: Any, frame: Any) -> None:
        seen[type(frame).__name__] += 1
        real(peer, frame)

    hooks.on_frame = on_frame  # type: ignore[method-assign]
    return seen


def lent(rank: Rank, askers: int) -> bool:
    """This prefill rank has room 1's requests of so many decode ranks, and a slot that came with each of them."""
    legs = list(rank.endpoint._source._rooms.pending.get(1, {}).values())
    return len(legs) == askers and all(leg.stage is not None and any(leg.stage.grants.values()) for leg in legs)


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2)])
def test_a_request_of_one_block_a_leg_asks_for_no_slot(world: World, p: int, d: int) -> None:
    prefill, decode = world.pair(p, d, **ONE_SLOT)
    frames = [heard(rank) for rank in decode]
    receivers = [ask(rank, 1, [4]) for rank in decode]
    assert until(lambda: all(lent(rank, d) for rank in prefill))
    for rank in prefill:
        give(rank, 1, [1])
    assert [r.wait(30) for r in receivers] == [TransferState.SUCCESS] * d, [r.error for r in receivers]
    for rank, seen in zip(decode, frames, strict=True):
        assert rank.pool.holds(1, [4])
        assert seen["SlotFilled"] >= 1 and seen["SlotsWanted"] <= seen["SlotFilled"] - 1
        book = rank.endpoint._destination.intake.book
        assert until(lambda b=book: b.counts()["granted"] == 0)


def test_half_of_an_arena_stays_for_who_needs_it_now() -> None:
    book = SlotBook({MemoryKind.DRAM: (4, 1)})
    lent = 0
    for leg in range(4):
        if book.roomy(MemoryKind.DRAM):
            book.want(f"peer-{leg}", leg, MemoryKind.DRAM, 1)
        lent += len(list(book.lend()))
    assert lent == 2
    assert not book.roomy(MemoryKind.VRAM)
