"""Executes plans: bounded windows, a queue per peer, own deadlines, nothing reported before it settled.

One thread drives it (`step`). A job ends in exactly one `on_finish(job)`; when handles were still
in flight at that point (`job.settled` False), `on_drained(job)` follows once the last of them is
done. A handle that errored may have pieces in flight for ever: such a job never drains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from pdtransfer.agent.port import (
    AgentFailure,
    AgentPort,
    Descriptors,
    Handle,
    HandleState,
    Operation,
    Prepared,
)
from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import DeadlineExceeded, TransferError
from pdtransfer.plan import TransferPlan

HANDLE_PIECES = 4096
HANDLE_BYTES = 4 << 20
"""At most that many descriptors and bytes a handle."""
PEER_HANDLES = 4
"""Handles in flight to one peer: rates are flat from 2 on, and one bad peer can't take the window."""
CHECK_EVERY = 0.005
"""Seconds between looks at the deadlines."""
STALLED_AFTER = 1.0
"""Seconds after which a handle no longer counts in the shared window (only in its peer's)."""


@dataclass(frozen=True)
class Batch:
    """What one handle moves."""

    local: Descriptors
    local_kind: MemoryKind
    remote: Descriptors
    remote_kind: MemoryKind
    nbytes: int


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
class _Flight:
    job: Job
    handle: Handle
    lists: tuple[Prepared, Prepared]
    nbytes: int
    posted_at: float


@dataclass(eq=False)
class Job:
    """One stream of batches to one peer. Feed it with `Mover.add`; `close` says nothing follows."""

    label: str
    peer: str
    deadline: float
    on_finish: Callable[[Job], None]
    on_drained: Callable[[Job], None]
    operation: Operation = "WRITE"
    waiting: deque[Batch] = field(default_factory=deque)
    closed: bool = False
    in_flight: int = 0
    lost: int = 0
    """Handles that errored: parts of them may still land."""
    bytes_done: int = 0
    bytes_queued: int = 0
    error: TransferError | None = None
    finished: bool = False
    drained: bool = False
    settle_by: float = float("inf")

    @property
    def settled(self) -> bool:
        """No byte of this job can land any more."""
        return self.in_flight == 0 and self.lost == 0


class Mover:
    """Posts and polls. `clock` is monotonic seconds."""

    def __init__(
        self,
        agent: AgentPort,
        *,
        window_bytes: int,
        window_ops: int,
        settle: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._window_bytes = window_bytes
        self._window_ops = window_ops
        self._settle = settle
        self._clock = clock
        self._jobs: set[Job] = set()
        self._ready: dict[str, deque[Job]] = {}
        """By peer: jobs with batches to post, in turn."""
        self._next_check = 0.0
        self._flights: list[_Flight] = []
        self.bytes_moved = 0

    @property
    def busy(self) -> bool:
        """Something is queued or in flight (handles of jobs that were given up do not count)."""
        return bool(self._ready) or any(not f.job.finished for f in self._flights)

    @property
    def handles_in_flight(self) -> int:
        """Posted handles that are not done."""
        return len(self._flights)

    def flies_to(self, peer: str) -> bool:
        """A job or a handle of this peer is left."""
        return any(j.peer == peer for j in self._jobs) or any(f.job.peer == peer for f in self._flights)

    def start(self, job: Job) -> None:
        """Take a job on; it may be empty at first."""
        self._jobs.add(job)

    def add(self, job: Job, more: Iterator[Batch]) -> None:
        """Queue batches of a job that goes on."""
        if job.error is None and not job.finished:
            idle = not job.waiting
            for batch in more:
                job.waiting.append(batch)
                job.bytes_queued += batch.nbytes
            if idle and job.waiting:
                self._ready.setdefault(job.peer, deque()).append(job)

    def close(self, job: Job) -> None:
        """No more batches."""
        job.closed = True
        self._maybe_finish(job)

    def fail(self, job: Job, error: TransferError) -> None:
        """Stop posting; the job finishes when its handles settled or `settle` seconds passed."""
        if job.error is None and not job.finished:
            job.error = error
            error.bytes_done = job.bytes_done
            job.waiting.clear()
            self._unready(job)
            job.settle_by = self._clock() + self._settle
            self._maybe_finish(job)

    def step(self) -> bool:
        """Post what fits, poll what flies, enforce deadlines. True when something changed."""
        now = self._clock()
        changed = self._poll()
        changed |= self._post(now)
        if now < self._next_check:
            return changed
        self._next_check = now + CHECK_EVERY
        for job in list(self._jobs):
            if job.error is None and now > job.deadline:
                self.fail(job, DeadlineExceeded(f"{job.label} did not finish in time", peer=job.peer))
                changed = True
            if not job.finished and now > job.settle_by:
                self._finish(job)
                changed = True
        return changed

    def _poll(self) -> bool:
        changed = False
        for flight in list(self._flights):
            job = flight.job
            try:
                if self._agent.poll(flight.handle) is HandleState.ACTIVE:
                    continue
            except AgentFailure as error:
                self._land(flight)
                job.lost += 1
                self.fail(job, error)
            else:
                self._land(flight)
                job.bytes_done += flight.nbytes
                self.bytes_moved += flight.nbytes
                with suppress(AgentFailure):  # the bytes are there; a list that stays costs memory only
                    self._agent.release(flight.handle)
                    for prepared in flight.lists:
                        self._agent.release_prepared(prepared)
            changed = True
            self._maybe_finish(job)
        return changed

    def _land(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        flight.job.in_flight -= 1

    def _post(self, now: float) -> bool:
        fresh = [f for f in self._flights if now - f.posted_at < STALLED_AFTER]
        ops, size = len(fresh), sum(f.nbytes for f in fresh)
        per_peer: dict[str, int] = {}
        for flight in self._flights:
            per_peer[flight.job.peer] = per_peer.get(flight.job.peer, 0) + 1
        changed, again = False, True
        while again:
            again = False
            for peer, queue in list(self._ready.items()):
                # A failed post may end jobs of other peers (their room fails): look again.
                if not queue or per_peer.get(peer, 0) >= PEER_HANDLES:
                    continue
                job = queue[0]
                batch = job.waiting[0]
                if ops and (ops >= self._window_ops or size + batch.nbytes > self._window_bytes):
                    return changed
                job.waiting.popleft()
                queue.rotate(-1)
                if not job.waiting:
                    self._unready(job)
                changed = again = True
                if self._post_one(job, batch, now):
                    ops, size = ops + 1, size + batch.nbytes
                    per_peer[peer] = per_peer.get(peer, 0) + 1
        return changed

    def _unready(self, job: Job) -> None:
        queue = self._ready.get(job.peer)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._ready[job.peer]

    def _post_one(self, job: Job, batch: Batch, now: float) -> bool:
        try:
            local = self._agent.prepare(None, batch.local, batch.local_kind)
            remote = self._agent.prepare(job.peer, batch.remote, batch.remote_kind)
            order = np.arange(len(batch.local), dtype=np.int32)
            handle = self._agent.post(job.operation, local, order, remote, order)
        except AgentFailure as error:
            job.lost += error.posted
            self.fail(job, error)
            return False
        job.in_flight += 1
        self._flights.append(_Flight(job, handle, (local, remote), batch.nbytes, now))
        return True

    def _maybe_finish(self, job: Job) -> None:
        if job.in_flight:
            return
        if not job.finished and (job.error is not None or (job.closed and not job.waiting)):
            self._finish(job)
        elif job.finished and not job.drained:
            self._drain(job)

    def _finish(self, job: Job) -> None:
        job.finished = True
        self._jobs.discard(job)
        job.drained = job.settled
        if job.error is not None:
            job.error.bytes_done = max(job.error.bytes_done, job.bytes_done)
        job.on_finish(job)

    def _drain(self, job: Job) -> None:
        if job.settled:
            job.drained = True
            job.on_drained(job)
