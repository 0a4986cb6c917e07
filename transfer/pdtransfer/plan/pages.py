"""Page lists: pool page numbers, checked before anything is addressed by them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankLayout
from pdtransfer.errors import LayoutMismatch

PageArray = npt.NDArray[np.int64]
PageList = Sequence[int] | PageArray


def as_pages(pages: PageList, items: int, side: str) -> PageArray:
    """The list as int64 (n,); raises LayoutMismatch when it is not flat or leaves a pool of `items` pages."""
    try:
        array = np.asarray(pages, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise LayoutMismatch(f"the {side} page list is not a list of page numbers: {error}") from None
    if array.ndim != 1:
        raise LayoutMismatch(f"the {side} page list is not flat")
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= items):
        raise LayoutMismatch(
            f"{side} pages {int(array.min())}..{int(array.max())} lie outside its pool of {items} pages"
        )
    return array


def distinct(array: PageArray, side: str) -> None:
    """Raise LayoutMismatch when a page is named twice."""
    # Not np.unique: its first call imports numpy.ma, 15 to 40 ms of the first request.
    ordered = np.sort(array)
    if (ordered[1:] == ordered[:-1]).any():
        raise LayoutMismatch(f"the {side} page list names a page twice")


def spaces_apart(layout: RankLayout, memory: MemoryKind | None) -> frozenset[str]:
    """Page spaces ("": the KV pages) in which each layer is in both memory kinds, so that a page number means
    another page in each of them; none where no memory is chosen."""
    if memory is None:
        return frozenset()
    times = Counter(r.key for r in layout.regions)
    single = {r.pool for r in layout.regions if times[r.key] == 1}
    return frozenset(r.pool for r in layout.regions) - single


def check_pages(
    layout: RankLayout, pages: PageList, side: str, *, pool: str = "", memory: MemoryKind | None = None
) -> None:
    """Raise LayoutMismatch when a page list lies outside the rank's pool or names a page twice.

    `memory` narrows to regions of that kind where a layer is registered in both; other layers count as they are."""
    times = Counter(r.key for r in layout.regions)
    items = [
        r.items
        for r in layout.regions
        if r.pool == pool and (memory is None or r.memory is memory or times[r.key] == 1)
    ]
    if not items and len(pages) and pool:
        raise LayoutMismatch(f"the {side} rank registered no region of pool {pool!r}")
    distinct(as_pages(pages, min(items, default=0), side), side)
