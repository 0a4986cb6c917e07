"""Unequal tensor parallelism in every strategy, over the fake agent: token-exact bytes, whatever way they go."""

from __future__ import annotations

import threading

import pytest
from kv_world import PAGES, TOKENS, Rank, World, ask, give, slots, until
from places import DEVICES, STAND_IN, Place

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.errors import LayoutMismatch
from pdtransfer.session.api import TransferState
from pdtransfer.session.frames import SlotFilled, SlotGrant

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
STRATEGIES = ("sliced", "staged", "merge", "split")
SMALL = {"staging_slot_bytes": 1024, "staging_bytes": 8192}
"""Slots of 2 to 4 pages' slices of one region: a request of 12 pages and 4 regions needs many."""


WAYS = [
    (strategy, p, d)
    for strategy in STRATEGIES
    for p, d in ((2, 1), (1, 2), (4, 1), (1, 4), (4, 2), (2, 4))
    if {"merge": p > d, "split": p < d}.get(strategy, True)
]
"""merge: the source's slice is its whole page (decode holds more heads); split: the other way round."""


def shuttle(prefill: list[Rank], decode: list[Rank], room: int, src: list[int], dst: list[int]) -> None:
    receivers = [ask(r, room, dst) for r in decode]
    senders = [give(r, room, src) for r in prefill]
    for transfer in (*senders, *receivers):
        assert transfer.wait(30) is SUCCESS, transfer.error
    for rank in decode:
        assert rank.pool.holds(room, dst)


@pytest.mark.parametrize(("strategy", "p", "d"), [("merge", 1, 2), ("split", 2, 1)])
def test_a_strategy_that_the_slices_do_not_allow_is_refused_by_name(world: World, strategy: str, p: int, d: int):
    _, decode = world.pair(p, d, strategy=strategy, **SMALL)
    with pytest.raises(LayoutMismatch, match=f"strategy {strategy}"):
        ask(decode[0], 1, [1])


@pytest.mark.parametrize(("strategy", "p", "d"), WAYS)
def test_every_strategy_brings_every_byte_and_touches_nothing_else(
    world: World, place: Place, strategy: str, p: int, d: int
):
    prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
    src, dst = [5, 1, 9, 2, 30, 7, 11, 12, 13, 20, 3, 19], [30, 7, 2, 3, 4, 31, 0, 8, 9, 10, 25, 26]
    shuttle(prefill, decode, 7, src, dst)
    shuttle(prefill, decode, 8, dst[:5], src[6:11])
    for rank in decode:
        assert rank.pool.untouched([*dst, *src[6:11]])
        assert until(lambda rank=rank: slots(rank)["granted"] == 0), slots(rank)
        scattered = rank.endpoint.counters.get("copied_bytes{operation=scatter}", 0)
        assert (scattered > 0) == (strategy in ("staged", "merge"))
    for rank in prefill:
        packs = rank.endpoint.counters.get("copied_bytes{operation=pack}", 0)
        assert (packs > 0) == (strategy in ("staged", "split"))
        assert until(lambda rank=rank: all(s.slots.free == 8 for s in rank.endpoint._depot._stores.values()))
        assert set(rank.endpoint._depot._stores) == {place.memory}


@pytest.mark.parametrize("place", DEVICES, indirect=True)
@pytest.mark.parametrize(("strategy", "p", "d"), [w for w in WAYS if max(w[1:]) == 2])
@pytest.mark.parametrize("kinds", [("mixed", "mixed"), ("mixed", "DRAM"), ("VRAM", "mixed"), ("DRAM", "VRAM")])
def test_device_and_host_regions_go_through_slots_together(
    world: World, place: Place, strategy: str, p: int, d: int, kinds: tuple[str, str]
):
    """Also with a digest of what is in the pages, and with slots for a sixth of the request only."""
    options = {"strategy": strategy, "digest": True, **SMALL}
    prefill = [world.rank(Role.PREFILL, t, p, memory=kinds[0], **options) for t in range(p)]
    decode = [world.rank(Role.DECODE, t, d, memory=kinds[1], **options) for t in range(d)]
    world.wire(prefill, decode)
    real = {"mixed": {"VRAM", "DRAM"}}
    for rank, kind in ((prefill[0], kinds[0]), (decode[0], kinds[1])):
        arenas = {a.memory for a in rank.endpoint.card.staging}
        assert arenas == ({"DRAM"} if place.emulated else real.get(kind, {kind}))
    src, dst = [5, 1, 9, 2, 8, 13, 14, 15, 16, 17, 18, 19], [30, 7, 2, 1, 0, 19, 18, 17, 16, 15, 14, 13]
    shuttle(prefill, decode, 3, src, dst)
    assert all(r.pool.untouched(dst) for r in decode)


def test_without_arenas_unequal_slices_are_written_in_place(world: World):
    prefill, decode = world.pair(2, 1, staging_bytes=0)
    assert not decode[0].endpoint.card.staging
    shuttle(prefill, decode, 1, [1, 2, 3], [4, 5, 6])
    assert "copied_bytes" not in decode[0].endpoint.counters


@pytest.mark.parametrize(("strategy", "p", "d"), [w for w in WAYS if max(w[1:]) == 2])
def test_a_prefix_that_decode_has_and_a_ragged_last_page_in_every_strategy(
    world: World, place: Place, strategy: str, p: int, d: int
):
    prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
    receivers = [ask(r, 1, [4, 5], first_page=3) for r in decode]  # the prompt ends one token before its page
    for rank in prefill:
        give(rank, 1, [10, 11, 12, 13, 14])
    for rank, receiver in zip(decode, receivers, strict=True):
        assert receiver.wait(30) is SUCCESS, receiver.error
        assert rank.pool.holds(1, [4, 5], first_page=3) and rank.pool.untouched([4, 5])


@pytest.mark.parametrize("place", [STAND_IN], indirect=True, ids=["stand-in"])
def test_a_slot_of_either_memory_kind_is_used_as_soon_as_it_is_lent(world: World, place: Place):
    """No host slot is lent before a device's was filled. A source that kept its blocks in order (host memory comes
    first) would wait for ever, and two requests that hold slots of one kind each for each other."""
    (prefill, other), (decode,) = world.pair(2, 1, memory="mixed", strategy="staged", **SMALL)
    held: list[tuple[object, SlotGrant]] = []
    filled: list[SlotFilled] = []
    lend, say = decode.endpoint._wiring.send, prefill.endpoint._wiring.send
    lock = threading.Lock()  # the two ranks have threads of their own

    def lend_late(peer, frame):
        with lock:
            if isinstance(frame, SlotGrant) and frame.arena is MemoryKind.DRAM and not filled:
                held.append((peer, frame))
                return
        lend(peer, frame)

    def say_filled(peer, frame):
        with lock:
            if isinstance(frame, SlotFilled):
                filled.append(frame)
            while held and filled:
                decode.endpoint._core.call(lend, *held.pop())
        say(peer, frame)

    decode.endpoint._wiring.send = lend_late  # type: ignore[method-assign]
    prefill.endpoint._wiring.send = say_filled  # type: ignore[method-assign]
    shuttle([prefill, other], [decode], 1, [1, 2, 3], [4, 5, 6])
    lanes = next(iter(decode.endpoint._destination.pairs._known.values())).pairs[None, None].plan.lanes
    kinds = [lanes[frame.lane].destination_kind for frame in filled]
    assert kinds[0] is MemoryKind.VRAM and MemoryKind.DRAM in kinds


def test_a_whole_pool_goes_through_eight_slots(world: World):
    prefill, decode = world.pair(2, 1, strategy="staged", **SMALL)
    order = list(reversed(range(PAGES)))
    shuttle(prefill, decode, 1, list(range(PAGES)), order)
    assert TOKENS * PAGES > 0
