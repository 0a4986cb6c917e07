"""Blocks, descriptor counts and bounds of a plan, and what it refuses: numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import StagingArena
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.errors import LayoutMismatch, StaleRegistration
from pdtransfer.plan import (
    block_count,
    blocks,
    check_pages,
    check_pair,
    page_indices,
    pages_table,
    pair_plan,
    plan,
    row_map,
    slice_indices,
    slices_table,
    unit_indices,
    units_table,
)

KIB, MIB = 1 << 10, 1 << 20


def layout(
    tp: int = 0,
    size: int = 1,
    *,
    layers: int = 16,
    tokens: int = 16,
    pages: int = 512,
    heads: int = 8,
    step: int = 1 << 30,
    first: int = 0,
    memory: MemoryKind = MemoryKind.DRAM,
    pool: str = "",
) -> RankLayout:
    """The bench's model: 8 KV heads of 128, bf16; regions `step` bytes apart from `first` on."""
    count = heads // size
    return RankLayout(
        page_tokens=tokens,
        kv_dtype="bf16",
        heads=HeadSlice(first=tp * count, count=count, total=heads),
        coordinates=RankCoordinates(tp=tp, tp_size=size),
        regions=tuple(
            Region(
                layer=layer,
                kind=kind,
                item_bytes=tokens * count * 256,
                items=pages,
                memory=memory,
                address=first + step * (2 * layer + n),
                pool=pool,
            )
            for layer in range(layers)
            for n, kind in enumerate((RegionKind.KEY, RegionKind.VALUE))
        ),
    )


# --- blocks ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    pages=st.integers(1, 300),
    layers=st.integers(1, 20),
    tokens=st.sampled_from([1, 16, 64]),
    slot=st.integers(256 * KIB, 4 * MIB),
    first=st.integers(0, 1000),
)
def test_blocks_cover_every_page_of_every_region_once_and_fill_their_slots(
    pages: int, layers: int, tokens: int, slot: int, first: int
) -> None:
    (lane,) = pair_plan(layout(0, 2, layers=layers, tokens=tokens), layout(layers=layers, tokens=tokens)).lanes
    covered = np.zeros((lane.regions, pages), dtype=int)
    made = list(blocks(lane, first, pages, slot))
    for block in made:
        assert block.nbytes == block.regions * block.pages * lane.unit <= slot
        at = block.first_page - first
        covered[block.first_region : block.first_region + block.regions, at : at + block.pages] += 1
    assert (covered == 1).all()
    assert len(made) == block_count(lane, pages, slot)
    nbytes = pages * lane.regions * lane.unit
    # The bound of the issue, for a staged request: one descriptor a block.
    assert len(made) <= nbytes / (64 * KIB) + lane.regions
    # No cut into strips of one width does better than twice what the bytes need, plus one a strip.
    assert len(made) <= 2 * -(-nbytes // slot) + -(-pages * lane.unit // slot) + 1


def test_a_small_request_is_one_block_and_a_large_one_fills_every_slot() -> None:
    (lane,) = pair_plan(layout(0, 2), layout()).lanes
    assert (lane.piece, lane.unit, lane.regions) == (1024, 16 * KIB, 32)
    # 64 tokens: 4 pages x 32 regions x 16 KiB = 2 MiB. 4096 tokens: 256 pages, 128 MiB, 64 slots of 2 MiB.
    assert len(list(blocks(lane, 0, 4, 2 * MIB))) == 1
    assert {b.nbytes for b in blocks(lane, 0, 256, 2 * MIB)} == {2 * MIB}
    assert block_count(lane, 256, 2 * MIB) == 64
    # 100 pages in slots of 128: a strip of 100 would leave 22 % of each of 32 slots empty; 4 strips of 25
    # with 5 regions a block need 4 x 7.
    assert block_count(lane, 100, 2 * MIB) == 28
    assert not list(blocks(lane, 0, 0, 2 * MIB))


def test_blocks_of_some_layers_only() -> None:
    (lane,) = pair_plan(layout(0, 2, layers=4), layout(layers=4)).lanes
    made = list(blocks(lane, 0, 4, 2 * MIB, lane.regions_of(range(1, 3))))
    assert [(b.first_region, b.regions, b.pages) for b in made] == [(2, 4, 4)]
    assert not list(blocks(lane, 0, 4, 2 * MIB, lane.regions_of(range(9, 10))))


def test_a_unit_that_fits_no_slot_is_refused_by_name() -> None:
    pair = pair_plan(layout(0, 2), layout())
    (lane,) = pair.lanes
    for strategy in ("staged", "merge"):
        assert pair.allowed(strategy, 8 * KIB) == "layer 0 K: a page's slice has 16384 bytes, a slot 8192"
    with pytest.raises(LayoutMismatch, match="layer 0 K: a page's slice has 16384 bytes, a slot 8192"):
        next(blocks(lane, 0, 1, 8 * KIB))
    with pytest.raises(LayoutMismatch, match="a slot 8192"):
        units_table(StagingArena(memory=MemoryKind.DRAM, address=0, slot_bytes=8 * KIB, slots=2), lane.unit)


# --- tables ---------------------------------------------------------------------------------------


def test_tables_and_indices_of_a_small_pair() -> None:
    """Prefill rank 1 of 2 (heads 1) to the one decode rank; 2 tokens a page, 8 bytes a head of a token."""

    def small(tp: int, size: int, first: int) -> RankLayout:
        count = 2 // size
        return RankLayout(
            page_tokens=2,
            kv_dtype="bf16",
            heads=HeadSlice(first=tp * count, count=count, total=2),
            coordinates=RankCoordinates(tp=tp, tp_size=size),
            regions=tuple(
                Region(layer=0, kind=k, item_bytes=16 * count, items=n, memory=MemoryKind.DRAM, address=a)
                for k, n, a in ((RegionKind.KEY, 3, first), (RegionKind.VALUE, 5, first + 1000))
            ),
        )

    (lane,) = pair_plan(small(1, 2, 100), small(0, 1, 7000)).lanes
    assert pages_table(lane.source).tolist() == [[100, 16, 0, 16, 3], [1100, 16, 0, 16, 5]]
    assert slices_table(lane.source, lane).tolist() == [[100, 8, 0, 8, 6], [1100, 8, 0, 8, 10]]
    # Decode's rows have 16 bytes a token and head 1 begins 8 bytes in.
    assert slices_table(lane.destination, lane).tolist() == [[7008, 8, 0, 16, 6], [8008, 8, 0, 16, 10]]
    pages = np.array([2, 0])
    # K has pieces 0..2, V 3..7.
    assert page_indices(lane.source, range(2), pages).tolist() == [2, 0, 5, 3]
    assert page_indices(lane.source, range(1, 2), pages).tolist() == [5, 3]
    # Slices: K 0..5, V 6..15; page 2 of K is 4, 5.
    assert slice_indices(lane.destination, lane, range(2), pages).tolist() == [4, 5, 0, 1, 10, 11, 6, 7]
    arena = StagingArena(memory=MemoryKind.DRAM, device=3, address=10_000, slot_bytes=100, slots=2)
    assert units_table(arena, lane.unit).tolist() == [[10_000, 16, 3, 16, 6], [10_100, 16, 3, 16, 6]]
    assert unit_indices(1, 3, 6).tolist() == [6, 7, 8]
    assert unit_indices(1, 2, 6, first=3).tolist() == [9, 10]


def test_a_pool_with_more_pieces_than_nixl_can_number_is_refused_by_name() -> None:
    many = layout(layers=1, pages=1 << 30, step=1 << 50)
    with pytest.raises(LayoutMismatch, match="more pages than a NIXL list can hold"):
        pair_plan(many, many)
    # 2 x 2^26 pages are few enough, 2 x 2^26 x 16 slices are not: staged is all that is left.
    halved = pair_plan(layout(0, 2, layers=1, pages=1 << 26, step=1 << 50), layout(layers=1, pages=512))
    assert halved.allowed("sliced", 0) == "layer 0 K: the pool has more slices than a NIXL list can hold"
    assert halved.allowed("staged", MIB) is None


def test_a_region_beyond_the_address_space_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="a decode region ends beyond the address space"):
        pair_plan(layout(layers=1), layout(layers=1, first=2**64 - 4096 - (1 << 30)))


# --- rows -----------------------------------------------------------------------------------------


def test_regions_on_one_grid_share_a_matrix_and_the_others_have_their_own() -> None:
    """1 KiB slices: regions of the first layout are equal modulo 1 KiB; K and V of the second are not."""
    source = layout(0, 2, layers=2)
    aligned = layout(layers=2, step=(1 << 30) + 2048)
    shifted = layout(layers=2, step=(1 << 30) + 512)
    (lane,) = pair_plan(source, aligned).lanes
    (block,) = blocks(lane, 0, 1, 2 * MIB)
    found = row_map(lane, lane.destination)
    assert [(g.address, g.row_bytes) for g in found.groups] == [(0, 1024)]
    (copy,) = found.rows(block, np.array([3]))
    # Page 3 of K of layer 0: tokens are 2 KiB apart, pages 32 KiB: rows 96, 98, ...
    assert copy.indices[:3].tolist() == [96, 98, 100] and copy.count == 4 * 16
    (lane,) = pair_plan(source, shifted).lanes
    found = row_map(lane, lane.destination)
    assert [g.address for g in found.groups] == [0, (1 << 30) + 512]
    copies = found.rows(block, np.array([3]))
    assert [(c.group.address, c.first, c.count) for c in copies] == [
        (0, 0, 16),
        ((1 << 30) + 512, 16, 16),
        (0, 32, 16),
        ((1 << 30) + 512, 48, 16),
    ]


def test_where_the_slice_is_the_page_rows_are_as_long_as_the_addresses_allow() -> None:
    (lane,) = pair_plan(layout(0, 2, layers=2), layout(layers=2)).lanes
    assert lane.source.whole and not lane.destination.whole
    assert row_map(lane, lane.source).groups[0].row_bytes == 16 * KIB
    (lane,) = pair_plan(layout(0, 2, layers=2, step=(1 << 30) + 4096), layout(layers=2)).lanes
    assert row_map(lane, lane.source).groups[0].row_bytes == 4 * KIB


# --- what a request of a pair may and must say ----------------------------------------------------


def test_a_pair_tells_its_bytes_and_which_strategies_write_into_pages() -> None:
    pair = pair_plan(layout(1, 2), layout())
    assert pair.unequal and pair.nbytes(256) == 128 * MIB and pair.nbytes(0) == 0
    assert [pair.in_place(s) for s in ("sliced", "split", "staged", "merge")] == [True, True, False, False]
    assert pair.allowed("direct", MIB) == "layer 0 K: the slices are unequal"
    equal = pair_plan(layout(), layout())
    assert not equal.unequal and equal.allowed("direct", 0) is None and equal.in_place("direct")
    assert equal.allowed("staged", MIB) == "every slice is a whole page on both sides"


def test_a_page_space_of_its_own_is_counted_and_must_be_the_same_on_both_sides() -> None:
    window = layout(layers=2, pool="window", first=1 << 45)
    both = layout(layers=2).model_copy(
        update={
            "regions": (
                *layout(layers=2).regions,
                *(r.model_copy(update={"layer": r.layer + 2}) for r in window.regions),
            )
        }
    )
    pair = pair_plan(both, both)
    assert [(lane.pool, lane.layers) for lane in pair.lanes] == [("", (0, 0, 1, 1)), ("window", (2, 2, 3, 3))]
    page = 32 * KIB
    assert pair.nbytes(10) == 40 * page and pair.nbytes(10, {"window": 3}) == 52 * page
    made = plan(both, both, [0], [1], pools={"window": ([2, 3], [4, 6])})
    assert [s.source.tolist()[0][:2] for s in made.segments] == [[0, page], [(1 << 45) + 2 * page, page]]
    with pytest.raises(LayoutMismatch, match=r"layer 0 K: its pages are of pool '' at prefill and 'window' at decode"):
        pair_plan(layout(layers=1), layout(layers=1, pool="window"))
    check_pages(both, [511], "decode", pool="window")
    with pytest.raises(LayoutMismatch, match=r"decode pages 512\.\.512 lie outside its pool of 512"):
        check_pages(both, [512], "decode", pool="window")
    with pytest.raises(LayoutMismatch, match="no region of pool 'other'"):
        check_pages(both, [0], "decode", pool="other")


def test_a_pair_with_a_layer_in_both_memory_kinds_is_good_when_every_choice_is() -> None:
    device = layout(layers=1, memory=MemoryKind.VRAM)
    host = layout(layers=1, first=1 << 45, pages=2048)
    both = device.model_copy(update={"regions": (*device.regions, *host.regions)})
    check_pair(layout(layers=1), both)
    check_pair(both, both)
    with pytest.raises(LayoutMismatch, match=r"the decode rank registered layer 0 K twice .*must say which"):
        pair_plan(layout(layers=1), both)
    pair = pair_plan(layout(layers=1), both, destination_memory=MemoryKind.DRAM)
    assert pair.lanes[0].destination_kind is MemoryKind.DRAM
    check_pages(both, [2000], "decode", memory=MemoryKind.DRAM)
    with pytest.raises(LayoutMismatch, match="pool of 512"):
        check_pages(both, [2000], "decode", memory=MemoryKind.VRAM)
    # One choice that does not fit refuses the pair before any request.
    halved = tuple(r.model_copy(update={"item_bytes": r.item_bytes // 2}) for r in host.regions)
    with pytest.raises(LayoutMismatch, match="a head has"):
        check_pair(layout(layers=1), device.model_copy(update={"regions": (*device.regions, *halved)}))
    unnamed = tuple(r.model_copy(update={"memory": None}) for r in host.regions)
    with pytest.raises(StaleRegistration):
        check_pair(layout(layers=1), device.model_copy(update={"regions": (*device.regions, *unnamed)}))
    with pytest.raises(LayoutMismatch, match="layer 0 K twice in DRAM"):
        check_pair(host.model_copy(update={"regions": (*host.regions, *host.regions)}), host)


def test_page_lists_that_are_no_numbers_are_refused_by_name() -> None:
    for bad in ([2**70], ["x"], [[0]]):
        with pytest.raises(LayoutMismatch, match="decode page list"):
            check_pages(layout(layers=1), bad, "decode")  # type: ignore[arg-type]


def test_lanes_are_the_same_whichever_order_the_regions_were_registered_in() -> None:
    """Both ranks make the plan by themselves: a lane's number has to mean the same."""
    ours = layout(0, 2, layers=3)
    shuffled = ours.model_copy(update={"regions": tuple(reversed(ours.regions))})
    one, two = pair_plan(ours, layout(layers=3)), pair_plan(shuffled, layout(layers=3))
    assert [lane.names for lane in one.lanes] == [lane.names for lane in two.lanes]
    assert [lane.source.addresses.tolist() for lane in one.lanes] == [
        lane.source.addresses.tolist() for lane in two.lanes
    ]
