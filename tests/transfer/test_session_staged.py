"""Unequal tensor parallelism in every strategy, over the fake agent: token-exact bytes, whatever way they go."""

from __future__ import annotations

import pytest
from kv_world import PAGES, TOKENS, Rank, World, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.errors import LayoutMismatch
from pdtransfer.session.api import TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
STRATEGIES = ("sliced", "staged", "merge", "split")
SMALL = {"staging_slot_bytes": 1024, "staging_bytes": 8192}
"""Slots of 2 to 4 pages' slices of one region: a request of 12 pages and 4 regions needs many."""


def possible(strategy: str, p: int, d: int) -> bool:
    """merge: the source's slice is its whole page (decode holds more heads); split: the other way round."""
    return {"merge": p > d, "split": p < d}.get(strategy, True)


def shuttle(prefill: list[Rank], decode: list[Rank], room: int, src: list[int], dst: list[int]) -> None:
    receivers = [ask(r, room, dst) for r in decode]
    senders = [give(r, room, src) for r in prefill]
    for transfer in (*senders, *receivers):
        assert transfer.wait(10) is SUCCESS, transfer.error
    for rank in decode:
        assert rank.pool.holds(room, dst)


def free_slots(rank: Rank) -> dict[str, int]:
    return rank.endpoint._destination.intake.book.counts()


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_brings_every_byte_and_touches_nothing_else(world: World, strategy: str, p: int, d: int):
    if not possible(strategy, p, d):
        prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
        with pytest.raises(LayoutMismatch, match=f"strategy {strategy}"):
            ask(decode[0], 1, [1])
        return
    prefill, decode = world.pair(p, d, strategy=strategy, **SMALL)
    src, dst = [5, 1, 9, 2, 30, 7, 11, 12, 13, 20, 3, 19], [30, 7, 2, 3, 4, 31, 0, 8, 9, 10, 25, 26]
    shuttle(prefill, decode, 7, src, dst)
    shuttle(prefill, decode, 8, dst[:5], src[6:11])
    for rank in decode:
        assert rank.pool.untouched([*dst, *src[6:11]])
        counts = free_slots(rank)
        assert until(lambda counts=counts, rank=rank: free_slots(rank)["granted"] == 0), counts
        assert (
            rank.endpoint.counters["copied_bytes{operation=scatter}"] > 0 if strategy in ("staged", "merge") else True
        )
    for rank in prefill:
        packs = rank.endpoint.counters.get("copied_bytes{operation=pack}", 0)
        assert (packs > 0) == (strategy in ("staged", "split"))
        assert until(lambda rank=rank: all(s.slots.free == 8 for s in rank.endpoint._depot._stores.values()))


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kinds", [("mixed", "mixed"), ("mixed", "DRAM"), ("VRAM", "mixed")])
def test_device_and_host_regions_go_through_slots_together(world: World, strategy: str, p: int, d: int, kinds):
    if not possible(strategy, p, d):
        return

    def emulated(card):
        return card.model_copy(update={"layout": card.layout.model_copy(update={"emulated_vram": True})})

    options = {"strategy": strategy, **SMALL}
    prefill = [world.rank(Role.PREFILL, t, p, memory=kinds[0], card=emulated, **options) for t in range(p)]
    decode = [world.rank(Role.DECODE, t, d, memory=kinds[1], card=emulated, **options) for t in range(d)]
    world.wire(prefill, decode)
    shuttle(prefill, decode, 3, [5, 1, 9, 2, 8], [30, 7, 2, 1, 0])
    assert all(r.pool.untouched([30, 7, 2, 1, 0]) for r in decode)


def test_without_arenas_unequal_slices_are_written_in_place(world: World):
    prefill, decode = world.pair(2, 1, staging_bytes=0)
    assert not decode[0].endpoint.card.staging
    shuttle(prefill, decode, 1, [1, 2, 3], [4, 5, 6])
    assert "copied_bytes" not in decode[0].endpoint.counters


def test_a_ragged_last_page_and_a_prefix_go_through_slots(world: World):
    prefill, decode = world.pair(2, 1, strategy="staged", **SMALL)
    receiver = ask(decode[0], 1, [4, 5], first_page=3)
    for rank in prefill:
        give(rank, 1, [10, 11, 12, 13, 14])
    assert receiver.wait(5) is SUCCESS, receiver.error
    assert decode[0].pool.holds(1, [4, 5], first_page=3) and decode[0].pool.untouched([4, 5])


def test_a_whole_pool_goes_through_eight_slots(world: World):
    prefill, decode = world.pair(2, 1, strategy="staged", **SMALL)
    order = list(reversed(range(PAGES)))
    shuttle(prefill, decode, 1, list(range(PAGES)), order)
    assert TOKENS * PAGES > 0
