"""Small pages (SGLang's default is one token) go through slots also where both slices are whole pages."""

from __future__ import annotations

import pytest
from kv_world import World, ask, give, until
from places import STAND_IN

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan import PairPlan, pair_plan
from pdtransfer.plan.cost import WIRE, Rates, Setting, choose, load_of
from pdtransfer.plan.lanes import SMALL_PAGE
from pdtransfer.session.api import TransferState

SUCCESS = TransferState.SUCCESS
MIB = 1 << 20
SLOTS = {"staging_slot_bytes": 1024, "staging_bytes": 8192}


def equal(page_bytes: int, *, layers: int = 16, index_bytes: int = 0) -> PairPlan:
    """Two ranks of equal slices: K and V of every layer in pages of `page_bytes`, and an index row."""
    kinds = [(RegionKind.KEY, page_bytes), (RegionKind.VALUE, page_bytes)]
    kinds += [(RegionKind.INDEX, index_bytes)] * (index_bytes > 0)
    regions = tuple(
        Region(layer=layer, kind=kind, item_bytes=size, items=8192, memory=MemoryKind.DRAM, address=n << 32)
        for n, (layer, (kind, size)) in enumerate((i, k) for i in range(layers) for k in kinds)
    )
    layout = RankLayout(
        page_tokens=1,
        kv_dtype="bfloat16",
        heads=HeadSlice(first=0, count=8, total=8),
        coordinates=RankCoordinates(tp=0, tp_size=1),
        regions=regions,
    )
    return pair_plan(layout, layout)


def chosen(pair: PairPlan, pages: int, rates: Rates) -> str:
    load = load_of(pair, pages, slot_bytes=8 * MIB)
    return choose(pair, load, Setting(cores=8), rates, source_slot=8 * MIB, destination_slot=8 * MIB).strategy


def test_pages_of_16_kib_have_no_other_way_and_smaller_ones_have() -> None:
    assert SMALL_PAGE == 16 * 1024  # the transfer study: from there on pieces go at the wire's rate
    large, small = equal(SMALL_PAGE), equal(SMALL_PAGE - 64)
    assert [lane.chooses for lane in (*large.lanes, *small.lanes)] == [False, True]
    assert not large.unequal and not small.unequal
    for strategy, direct in {"direct": True, "sliced": True, "staged": False, "merge": False, "split": False}.items():
        assert large.lanes[0].direct(strategy) and small.lanes[0].direct(strategy) is direct  # type: ignore[arg-type]
    assert large.allowed("staged", MIB) == small.allowed("sliced", MIB) == "every slice is a whole page on both sides"
    assert small.allowed("direct", 0) is None and small.allowed("staged", MIB) is None
    assert not small.in_place("staged") and small.in_place("direct") and large.in_place("staged")


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_long_requests_of_one_token_pages_are_staged_and_short_ones_are_not(transport: str) -> None:
    """By hand, TCP: 4096 tokens x 32 regions of 2 KiB are 131,072 pieces of 2.7 us = 354 ms; packed they are
    33 blocks, two copies of 256 MiB at 6.8 and 5.8 GB/s (40 and 46 ms) and rows of 45 and 105 ns (6 and 14 ms)."""
    rates = Rates(wire=WIRE[transport])  # type: ignore[index]
    assert chosen(equal(2048), 4096, rates) == "staged"
    assert chosen(equal(2048), 2, rates) == "direct"  # 64 pieces cost less than one block does
    assert chosen(equal(SMALL_PAGE), 4096, rates) == "direct"


def test_small_index_rows_have_a_choice_where_the_kv_pages_have_none() -> None:
    pair = equal(64 * 1024, index_bytes=132)
    assert {lane.unit: lane.chooses for lane in pair.lanes} == {64 * 1024: False, 132: True}
    assert load_of(pair, 100, slot_bytes=MIB).nbytes == 100 * 16 * 132
    assert pair.in_place("staged")  # the KV pages are written remotely all the same


@pytest.mark.parametrize("strategy", ["staged", "merge", "split"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_byte_arrives_in_its_page_and_nothing_else_changes(world: World, strategy: str, tp: int):
    prefill, decode = world.pair(tp, tp, strategy=strategy, **SLOTS)
    src, dst = [5, 1, 9, 2, 30, 7, 11, 12, 13, 20, 3, 19], [30, 7, 2, 3, 4, 31, 0, 8, 9, 10, 25, 26]
    receivers = [ask(rank, 7, dst) for rank in decode]
    senders = [give(rank, 7, src) for rank in prefill]
    for transfer in (*senders, *receivers):
        assert transfer.wait(20) is SUCCESS, transfer.error
    for rank in decode:
        assert rank.pool.holds(7, dst) and rank.pool.untouched(dst)
        assert (rank.endpoint.counters.get("copied_bytes{operation=scatter}", 0) > 0) == (strategy != "split")
        book = rank.endpoint._destination.intake.book
        assert until(lambda book=book: book.counts()["granted"] == 0)
    for rank in prefill:
        assert (rank.endpoint.counters.get("copied_bytes{operation=pack}", 0) > 0) == (strategy != "merge")


def test_a_failed_staged_request_frees_its_pages_at_once_and_its_slots_later(world: World):
    """The page ledger knows that only slots could still be written."""
    (prefill,), (decode,) = world.pair(strategy="staged", **SLOTS)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: any(seen.startswith("stall") for seen in prefill.agent.faults.seen))
    receiver.abort("test")
    assert receiver.wait(20) is TransferState.FAILED and receiver.pages_releasable
    assert decode.endpoint.counters["quarantined_bytes"] > 0
    assert world.hub.unstall(prefill.agent.name) > 0
    assert until(lambda: decode.endpoint.counters["quarantined_bytes"] == 0)
    assert decode.pool.untouched([])


def test_without_arenas_small_pages_go_directly_and_a_forced_way_is_refused_by_name(world: World):
    (prefill,), (decode,) = world.pair(staging_bytes=0)
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(20) is SUCCESS and decode.pool.holds(1, [4])
    forced = World(STAND_IN)
    try:
        _, (rank,) = forced.pair(strategy="staged", staging_bytes=0)
        with pytest.raises(LayoutMismatch, match="strategy staged: one of the two ranks has no staging arena"):
            ask(rank, 1, [4])
    finally:
        forced.close()
