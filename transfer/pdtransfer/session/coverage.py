"""Which pages of which regions of one request were taken already: each goes, and arrives, once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Area:
    """A rectangle of one lane: regions `first_region ..`, pages at positions `first_page ..` of the
    request's page list."""

    lane: int
    first_region: int
    regions: int
    first_page: int
    pages: int


class Coverage:
    """One bit a region and page. `shapes`: (regions, pages) of each lane."""

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        self._taken = [np.zeros(shape, dtype=bool) for shape in shapes]
        self.size = self.left = sum(t.size for t in self._taken)
        """Region pages in all, and those that were not taken."""

    def inside(self, area: Area) -> bool:
        """The rectangle names a lane, and regions and pages that it has."""
        if area.lane >= len(self._taken):
            return False
        regions, pages = self._taken[area.lane].shape
        return area.first_region + area.regions <= regions and area.first_page + area.pages <= pages

    def whole_pages(self, lane: int) -> int:
        """Pages of which every region was taken."""
        return int(self._taken[lane].all(axis=0).sum())

    def take(self, area: Area) -> bool:
        """Take it all; False (and nothing taken) when some of it was taken before."""
        part = self._part(area)
        if part.any():
            return False
        part[:] = True
        self.left -= part.size
        return True

    def take_rest(self, area: Area) -> Iterator[Area]:
        """Take what was not taken before, as rectangles."""
        if self.take(area):
            yield area
            return
        part = self._part(area)
        row = 0
        while row < area.regions:
            end = row + 1
            while end < area.regions and (part[end] == part[row]).all():
                end += 1
            edges = np.flatnonzero(np.diff(np.concatenate(([True], part[row], [True])).astype(np.int8)))
            for start, stop in edges.reshape(-1, 2).tolist():
                part[row:end, start:stop] = True
                self.left -= (end - row) * (stop - start)
                yield Area(area.lane, area.first_region + row, end - row, area.first_page + start, stop - start)
            row = end

    def _part(self, area: Area) -> np.ndarray:
        rows = slice(area.first_region, area.first_region + area.regions)
        return self._taken[area.lane][rows, area.first_page : area.first_page + area.pages]
