"""What the mover is given: jobs, and the handles' worth of bytes ("items") that they consist of.

A `Prepped` names rows of two descriptor lists that were prepared once, at wiring, and are reused by
every request. A `Batch` brings its own descriptors; they are prepared and released with the handle,
which is right for small one-off things such as probes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pdtransfer.agent.port import Descriptors, Indices, Operation, Prepared
from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import TransferError
from pdtransfer.plan import TransferPlan

HANDLE_PIECES = 4096
HANDLE_BYTES = 4 << 20
"""At most that many descriptors and bytes a handle."""
LONE_BYTES, COPIED_BYTES = 32 << 20, 64 << 20
"""Bytes of a handle while nothing else wants to post; the second where posts copy by themselves (over CMA), so that
nothing is gained by two in flight. What Python does for a handle costs 300 to 400 us, because the copies emptied the
caches (tests/bench/steps.py shows it: "between two posts"). Such a post holds the thread for some 6 to 12 ms, which is
what somebody new waits at most; elsewhere the window bounds what is in flight."""


def handle_bytes(*, lone: bool, copied: bool) -> int:
    """Most bytes of a handle: of a job that is alone or one of several, where a post copies or does not."""
    if not lone:
        return HANDLE_BYTES
    return COPIED_BYTES if copied else LONE_BYTES


OnDone = Callable[[bool], None]
"""Called exactly once, before the job's `on_finish`: True when every byte of the item is in place; False
when it was dropped before it was posted, was refused, failed, or is still in flight when its job is given
up. In the last two cases parts of it may be read and land later (`Job.settled` is False): whoever reuses
the local memory then sends other bytes to where nothing may be taken from before the job is drained."""


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """One handle's worth with descriptors of its own, (N, 3) on both sides."""

    local: Descriptors
    local_kind: MemoryKind
    remote: Descriptors
    remote_kind: MemoryKind
    nbytes: int
    on_done: OnDone | None = None

    @property
    def pieces(self) -> int:
        """Descriptors."""
        return len(self.local)


@dataclass(frozen=True, eq=False, slots=True)
class Prepped:
    """One handle's worth out of prepared lists: row `local_indices[i]` goes to (WRITE) or comes from
    (READ) row `remote_indices[i]`. `pieces` counts descriptors after NIXL merged dense runs."""

    local: Prepared
    local_indices: Indices
    remote: Prepared
    remote_indices: Indices
    nbytes: int
    pieces: int
    on_done: OnDone | None = None


Item = Batch | Prepped


def prepped(
    local: Prepared,
    local_indices: Indices,
    remote: Prepared,
    remote_indices: Indices,
    unit: int,
    *,
    dense: bool = False,
    on_done: OnDone | None = None,
    limit: Callable[[], int] = lambda: HANDLE_BYTES,
) -> Iterator[Prepped]:
    """Cut index arrays of equal length into handles; `unit` is the bytes of each row of both lists and
    `limit` the most bytes of the handle that is made when it is called.

    `dense`: rows with consecutive indices touch on both sides, so NIXL makes one descriptor of a run
    (both sides' stride equals their bytes). `on_done` is called once per handle."""
    if len(local_indices) != len(remote_indices):
        raise ValueError(f"{len(local_indices)} local rows for {len(remote_indices)} remote rows")
    total = len(local_indices)
    breaks = np.zeros(total, dtype=np.int64)  # before each row: how many runs ended
    if dense and total > 1:
        np.cumsum((np.diff(local_indices) != 1) | (np.diff(remote_indices) != 1), out=breaks[1:])
    start = 0
    while start < total:
        rows = max(1, limit() // unit)
        if not dense:
            rows = min(rows, HANDLE_PIECES)
        stop = min(start + rows, total)
        count = stop - start
        pieces = 1 + int(breaks[stop - 1] - breaks[start]) if dense else count
        yield Prepped(
            local, local_indices[start:stop], remote, remote_indices[start:stop], count * unit, pieces, on_done
        )
        start = stop


def batches(
    plan: TransferPlan,
    kind_at_source: Callable[[MemoryKind], MemoryKind],
    kind_at_destination: Callable[[MemoryKind], MemoryKind],
) -> Iterator[Batch]:
    """Cut a plan into handles. The `kind_*` functions map emulated VRAM to where it really lies."""
    for segment in plan.segments:
        sizes = segment.source[:, 1]
        start = 0
        ends = np.cumsum(sizes)
        while start < len(sizes):
            base = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, base + HANDLE_BYTES, side="right"))
            stop = min(max(stop, start + 1), start + HANDLE_PIECES, len(sizes))
            yield Batch(
                segment.source[start:stop],
                kind_at_source(segment.source_kind),
                segment.destination[start:stop],
                kind_at_destination(segment.destination_kind),
                int(ends[stop - 1]) - base,
            )
            start = stop


@dataclass(eq=False)
class Job:
    """One stream of items to one peer. Feed it with `Mover.add`; `Mover.close` says nothing follows.
    `deadline` and `settle_by` are monotonic seconds of the mover's clock."""

    label: str
    peer: str
    deadline: float
    on_finish: Callable[[Job], None]
    on_drained: Callable[[Job], None]
    operation: Operation = "WRITE"
    waiting: deque[Item | Iterator[Item]] = field(default_factory=deque)
    queued: bool = False
    """It stands in its peer's queue."""
    begun: bool = False
    """Something was added to it."""
    posted_at: float | None = None
    """When its first handle was posted."""
    closed: bool = False
    in_flight: int = 0
    lost: int = 0
    """Handles that errored: parts of them may still land."""
    bytes_done: int = 0
    handles: int = 0
    """Handles posted."""
    pieces: int = 0
    """Descriptors posted."""
    error: TransferError | None = None
    finished: bool = False
    drained: bool = False
    settle_by: float = float("inf")

    @property
    def settled(self) -> bool:
        """No byte of this job can land any more."""
        return self.in_flight == 0 and self.lost == 0

    @property
    def active(self) -> bool:
        """It may still be given something to post."""
        return self.error is None and not self.finished

    def head(self) -> Item | None:
        """The first waiting item, left where it is; iterators are pulled for it. None: nothing waits.
        Raises what an iterator raises."""
        while self.waiting:
            source = self.waiting[0]
            if isinstance(source, Batch | Prepped):
                return source
            item = next(source, None)
            if not self.active:  # the iterator ended its own job
                if item is not None and item.on_done is not None:
                    item.on_done(False)
                return None
            if item is None:
                self.waiting.popleft()
            else:
                self.waiting.appendleft(item)
        return None
