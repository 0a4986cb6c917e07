"""What planning costs: the pair once, and the indices and row copies of each request. No assertion.

Run: `python tests/bench/measure_planning.py`. Shape: 4096 tokens, 16 layers, 8 KV heads of 128, bf16, TP 2 to 1
(128 MiB a pair) and 1 to 2, random pages. Printed in microseconds, medians of 21, beside what 5 % of the same
bytes at 10 GB/s would be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice, RankCoordinates, RankLayout, Region, RegionKind
from pdtransfer.plan import Lane, PairPlan, blocks, page_indices, pair_plan, row_map, slice_indices, unit_indices

LAYERS, HEADS, HEAD_BYTES, TOKENS, SLOT = 16, 8, 256, 4096, 2 << 20


def layout(tp: int, size: int, page: int) -> RankLayout:
    """One rank of the bench's model; addresses are made up."""
    count, pages = HEADS // size, 2 * TOKENS // page
    item = page * count * HEAD_BYTES
    return RankLayout(
        page_tokens=page,
        kv_dtype="bf16",
        heads=HeadSlice(first=tp * count, count=count, total=HEADS),
        coordinates=RankCoordinates(tp=tp, tp_size=size),
        regions=tuple(
            Region(layer=i // 2, kind=k, item_bytes=item, items=pages, memory=MemoryKind.DRAM, address=(i + 1) << 32)
            for i, k in enumerate([RegionKind.KEY, RegionKind.VALUE] * LAYERS)
        ),
    )


def median(action: Callable[[], object], times: int = 21) -> float:
    """Microseconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e6


def staged(lane: Lane, pages: np.ndarray, *, source: bool) -> int:
    """One side's part of a staged request: row copies and slot indices of every block."""
    rows = row_map_of[lane, source]
    done = 0
    for block in blocks(lane, 0, len(pages), SLOT):
        rows.rows(block, pages[block.first_page : block.first_page + block.pages])
        unit_indices(1, block.regions * block.pages, SLOT // lane.unit)
        done += 1
    return done


row_map_of = {}


def main() -> None:
    """Print the table."""
    for page in (16, 64):
        for p, d in ((2, 1), (1, 2), (1, 1)):
            source, destination = layout(0, p, page), layout(0, d, page)
            pair: PairPlan = pair_plan(source, destination)
            (lane,) = pair.lanes
            n = TOKENS // page
            pages = np.random.default_rng(0).permutation(2 * n)[:n]
            every = range(lane.regions)
            print(f"TP {p} to {d}, page {page}: {pair.nbytes(n) >> 20} MiB", end="")
            print(f", 5 % of it at 10 GB/s {pair.nbytes(n) / 10e9 * 0.05 * 1e6:.0f} us")
            print(f"  pair, once         {median(lambda: pair_plan(source, destination)):8.0f}")  # noqa: B023
            print(f"  whole pages        {median(lambda: page_indices(lane.source, every, pages)):8.0f}")  # noqa: B023
            if lane.whole:
                continue
            for side in (True, False):
                row_map_of[lane, side] = row_map(lane, lane.source if side else lane.destination)
            print(f"  slices             {median(lambda: slice_indices(lane.source, lane, every, pages)):8.0f}")  # noqa: B023
            print(f"  staged, source     {median(lambda: staged(lane, pages, source=True)):8.0f}")  # noqa: B023
            print(f"  staged, destination{median(lambda: staged(lane, pages, source=False)):8.0f}")  # noqa: B023


if __name__ == "__main__":
    main()
