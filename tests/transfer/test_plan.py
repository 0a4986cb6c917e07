"""The plan against an independent token-by-token reference, and everything it refuses."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.contract.pairing import meet
from pdtransfer.errors import LayoutMismatch, StaleRegistration
from pdtransfer.plan import MAX_PIECE, TransferPlan, block_count, blocks, pair_plan, plan
from pdtransfer.plan.blocks import KEPT_BLOCKS
from pdtransfer.plan.blocks import _kept as kept_shapes

KINDS = [MemoryKind.VRAM, MemoryKind.DRAM]


class Side:
    """Ranks of one role with arrays (pages, tokens, heads of the rank, bytes a head)."""

    def __init__(self, tp_size, total, tokens, dims, pages, layers, kinds, rng, fill):
        self.ranks = []
        count = max(1, total // tp_size)
        for tp in range(tp_size):
            first = tp * total // tp_size
            arrays, regions = {}, []
            for layer in range(layers):
                for kind, dim in dims.items():
                    heads = 1 if kind is RegionKind.INDEX else count
                    array = np.zeros((pages, tokens, heads, dim), dtype=np.uint8)
                    if fill is not None:
                        low = 0 if kind is RegionKind.INDEX else first
                        array[:] = fill[layer, kind][:, :, low : low + heads]
                    arrays[layer, kind] = array
                    regions.append(
                        Region(
                            layer=layer,
                            kind=kind,
                            item_bytes=tokens * heads * dim,
                            items=pages,
                            memory=kinds[int(rng.integers(len(kinds)))],
                            address=int(array.ctypes.data),
                        )
                    )
            layout = RankLayout(
                page_tokens=tokens,
                kv_dtype="fp8",
                heads=HeadSlice(first=first, count=count, total=total),
                coordinates=RankCoordinates(tp=tp, tp_size=tp_size),
                regions=tuple(regions),
            )
            self.ranks.append((layout, arrays))


def execute(made: TransferPlan) -> None:
    for segment in made.segments:
        for (s, n, _), (d, m, _) in zip(segment.source.tolist(), segment.destination.tolist(), strict=True):
            assert n == m
            ctypes.memmove(d, s, n)


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    total=st.sampled_from([1, 2, 4, 8]),
    tokens=st.sampled_from([1, 2, 16]),
    layers=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_executing_the_plans_equals_copying_every_token_and_head_one_by_one(data, total, tokens, layers, seed):
    rng = np.random.default_rng(seed)
    # TP above the number of heads replicates them.
    p_tp, d_tp = (data.draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2))
    dims = {
        RegionKind.KEY: data.draw(st.sampled_from([2, 8])),
        RegionKind.VALUE: data.draw(st.sampled_from([2, 6])),
        RegionKind.INDEX: 3,
    }
    pages = 12
    n = data.draw(st.integers(0, 8))
    fill = {
        (layer, kind): rng.integers(1, 255, (pages, tokens, total, dim), dtype=np.uint8)
        for layer in range(layers)
        for kind, dim in dims.items()
    }
    source = Side(p_tp, total, tokens, dims, pages, layers, KINDS, rng, fill)
    target = Side(d_tp, total, tokens, dims, pages, layers, KINDS, rng, None)
    src = rng.permutation(pages)[:n].tolist()
    dst = (rng.permutation(pages)[:n] if data.draw(st.booleans()) else np.arange(2, 2 + n)).tolist()
    for layout, arrays in target.ranks:
        expected = {}
        for (layer, kind), array in arrays.items():
            want = np.zeros_like(array)
            heads = array.shape[2]
            first = layout.heads.first if kind is not RegionKind.INDEX else 0
            for s, d in zip(src, dst, strict=True):
                for token in range(tokens):
                    for head in range(heads):
                        want[d, token, head] = fill[layer, kind][s, token, first + head]
            expected[layer, kind] = want
        moved = 0
        for theirs, _ in source.ranks:
            if meet(theirs, layout):
                made = plan(theirs, layout, src, dst)
                moved += made.nbytes
                for segment in made.segments:
                    assert segment.strategy in ("direct", "sliced")
                execute(made)
        for key, want in expected.items():
            assert np.array_equal(arrays[key], want), key
        # Every byte is sent once, replicated heads and common rows too.
        assert moved == n * sum(a[0].nbytes for a in arrays.values())


def layout(**changes) -> RankLayout:
    regions = changes.pop("regions", None) or tuple(
        Region(layer=0, kind=k, item_bytes=4 * 2 * 8, items=10, memory=MemoryKind.DRAM, address=a)
        for k, a in ((RegionKind.KEY, 1000), (RegionKind.VALUE, 5000))
    )
    base = {
        "page_tokens": 4,
        "kv_dtype": "bf16",
        "heads": HeadSlice(first=0, count=2, total=2),
        "regions": regions,
    }
    return RankLayout(**{**base, **changes})


def test_equal_ranks_move_whole_pages_and_merge_runs_contiguous_on_both_sides():
    made = plan(layout(), layout(), [3, 4, 5, 9], [0, 1, 2, 7])
    (segment,) = made.segments
    assert segment.strategy == "direct"
    # Item 64 bytes: pages 3-5 are one run of 192 bytes, page 9 one of 64; K at 1000, V at 5000.
    assert segment.source[:, :2].tolist() == [[1192, 192], [1576, 64], [5192, 192], [5576, 64]]
    assert segment.destination[:, :2].tolist() == [[1000, 192], [1448, 64], [5000, 192], [5448, 64]]


def test_unequal_tp_writes_one_piece_a_token_at_its_head_offset():
    decode = layout(
        heads=HeadSlice(first=1, count=1, total=2),
        coordinates=RankCoordinates(tp=1, tp_size=2),
        regions=tuple(
            Region(layer=0, kind=k, item_bytes=32, items=10, memory=MemoryKind.VRAM, device=3, address=a)
            for k, a in ((RegionKind.KEY, 2000), (RegionKind.VALUE, 9000))
        ),
    )
    (segment,) = plan(layout(), decode, [1], [2]).segments
    assert (segment.source_kind, segment.destination_kind) == (MemoryKind.DRAM, MemoryKind.VRAM)
    # Rows are 16 bytes here and 8 there; head 1 starts 8 bytes in; page 1 at +64, page 2 at +64.
    assert segment.source[:4].tolist() == [[1072, 8, 0], [1088, 8, 0], [1104, 8, 0], [1120, 8, 0]]
    assert segment.destination[:4].tolist() == [[2064, 8, 3], [2072, 8, 3], [2080, 8, 3], [2088, 8, 3]]


def test_long_runs_are_cut_so_that_the_window_stays_a_bound():
    item = MAX_PIECE // 2
    big = layout(
        heads=None,
        regions=(Region(layer=0, kind=RegionKind.LATENT, item_bytes=item, items=9, memory=MemoryKind.DRAM),),
    )
    (segment,) = plan(big, big, range(5), range(5)).segments
    assert segment.source[:, 1].tolist() == [2 * item, 2 * item, item]


def test_pipeline_stages_map_by_layer_id():
    def of(*layers):
        return layout(
            heads=None,
            regions=tuple(
                Region(
                    layer=i,
                    kind=RegionKind.LATENT,
                    item_bytes=8,
                    items=4,
                    memory=MemoryKind.DRAM,
                    address=1000 * i + 1000,
                )
                for i in layers
            ),
        )

    made = plan(of(2, 3), of(0, 1, 2, 3), [0], [1])
    assert made.segments[0].source[:, 0].tolist() == [3000, 4000]
    assert made.segments[0].destination[:, 0].tolist() == [3008, 4008]
    with pytest.raises(LayoutMismatch, match="no common layer"):
        plan(of(0), of(1), [0], [0])


def region(**changes) -> Region:
    base = {"layer": 0, "kind": RegionKind.KEY, "item_bytes": 64, "items": 10, "memory": MemoryKind.DRAM}
    return Region(**{**base, **changes})


VALUE = region(kind=RegionKind.VALUE)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"regions": (region(memory=None), VALUE)}, StaleRegistration, "no memory kind"),
        ({"page_tokens": 8}, LayoutMismatch, "decode pages 8"),
        ({"kv_dtype": "fp8"}, LayoutMismatch, "decode as fp8"),
        ({"regions": (region(),)}, LayoutMismatch, "only the prefill rank registered layer 0 V"),
        ({"regions": (region(item_bytes=128), VALUE)}, LayoutMismatch, "8 bytes per token at prefill and 16"),
        ({"regions": (region(item_bytes=60), VALUE)}, LayoutMismatch, "whole number of heads"),
        ({"heads": HeadSlice(first=0, count=2, total=4)}, LayoutMismatch, "2 KV heads, decode 4"),
        ({"heads": None}, LayoutMismatch, "splits its rows by head"),
        ({"regions": (region(), region(memory=MemoryKind.VRAM), VALUE)}, LayoutMismatch, "must say which"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(changes, error, text):
    with pytest.raises(error, match=text):
        plan(layout(), layout(**changes), [], [])


def test_a_rank_without_segments_is_stale():
    with pytest.raises(StaleRegistration, match="no KV memory segments"):
        plan(layout(), RankLayout(page_tokens=4, kv_dtype="bf16"), [], [])


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        ([10], [0], "prefill pages 10..10 lie outside its pool of 10"),
        ([0], [-1], "decode pages -1"),
        ([0, 1], [0], "2 prefill pages can not fill 1"),
        ([0, 1], [3, 3], "names a page twice"),
    ],
)
def test_page_lists_that_do_not_fit_are_refused(src, dst, text):
    with pytest.raises(LayoutMismatch, match=text):
        plan(layout(), layout(), src, dst)


def test_a_layer_in_both_memory_kinds_is_planned_from_the_one_that_is_named():
    both = layout(
        regions=(
            region(address=100),
            region(address=7000, memory=MemoryKind.VRAM),
            VALUE,
        )
    )
    made = plan(both, layout(), [0], [0], source_memory=MemoryKind.VRAM)
    kinds = {(s.source_kind, s.destination_kind) for s in made.segments}
    assert kinds == {(MemoryKind.VRAM, MemoryKind.DRAM), (MemoryKind.DRAM, MemoryKind.DRAM)}


def test_requests_of_equal_shape_are_cut_once_and_very_large_ones_are_not_kept():
    # 32 bytes of a page of K and of V; a slot of 128 bytes holds 4 pages.
    decode = layout(
        heads=HeadSlice(first=1, count=1, total=2),
        regions=tuple(
            Region(layer=0, kind=k, item_bytes=32, items=10, memory=MemoryKind.DRAM)
            for k in (RegionKind.KEY, RegionKind.VALUE)
        ),
    )
    (lane,) = pair_plan(layout(), decode).lanes
    first = list(blocks(lane, 0, 7, 128))
    held = kept_shapes.cache_info()
    later = list(blocks(lane, 3, 7, 128))
    assert kept_shapes.cache_info().hits == held.hits + 1
    assert [replace(b, first_page=b.first_page + 3) for b in first] == later
    many = 4 * KEPT_BLOCKS
    assert sum(1 for _ in blocks(lane, 0, many, 128)) == block_count(lane, many, 128) == many // 2
    assert kept_shapes.cache_info().misses == held.misses
