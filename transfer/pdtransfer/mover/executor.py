"""Executes jobs: bounded windows, a queue per peer, own deadlines, nothing reported before it settled.

One thread drives it (`step`). A job ends in exactly one `on_finish(job)`; when handles were still
in flight at that point (`job.settled` False), `on_drained(job)` follows once the last of them is
done. A handle that errored may have pieces in flight for ever: such a job never drains.

What may fly is bounded over all peers and for each (`window`), whose turn it is to post is fair
(`queues`). Iterators are pulled when their turn comes: a backlog costs what its iterators cost.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from pdtransfer.agent.port import AgentFailure, AgentPort, HandleState
from pdtransfer.errors import DeadlineExceeded, TransferError
from pdtransfer.mover.jobs import Batch, Item, Job, Prepped, handle_bytes
from pdtransfer.mover.posting import post
from pdtransfer.mover.queues import PeerQueue, Ring
from pdtransfer.mover.window import Flight, Window

logger = logging.getLogger(__name__)

CHECK_EVERY = 0.005
"""Seconds between looks at the deadlines and at late handles."""
CHECK_JOBS = 256
"""Jobs looked at each time: with more, a deadline is noticed a few checks later."""
POST_TURN = 0.001
"""Seconds of posting after which `step` returns: over CMA a post copies its bytes, and all else waits."""


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
        self._settle = settle
        self._clock = clock
        self._queues: dict[str, PeerQueue] = {}
        self._ring = Ring()
        self._to_check: deque[Job] = deque()
        """Unfinished jobs (finished ones leave when they are next looked at)."""
        self._next_check = 0.0
        self._window = Window(window_bytes, window_ops)
        self._copies = False
        """The last handle was done when its post returned: the post copies, as over CMA."""
        self.bytes_moved = 0
        self.on_landed: Callable[[float], None] = lambda seconds: None
        """Hears how long each handle took that is done."""

    @property
    def busy(self) -> bool:
        """Something is queued or in flight (handles of jobs that were given up do not count)."""
        return self._window.live > 0 or len(self._ring) > 0

    @property
    def handles_in_flight(self) -> int:
        """Posted handles that are not done."""
        return len(self._window)

    @property
    def bytes_in_flight(self) -> int:
        """Of posted handles that are neither done nor late."""
        return self._window.nbytes

    @property
    def peers(self) -> frozenset[str]:
        """Agents that a job or a handle is left of."""
        return frozenset(self._queues)

    def handle_bytes(self) -> int:
        """Most bytes of a handle that is cut now: a job that is alone need not share its turn."""
        return handle_bytes(lone=self._ring.lone, copied=self._copies)

    def flies_to(self, peer: str) -> bool:
        """A job or a handle of this peer is left."""
        return peer in self._queues

    def start(self, job: Job) -> None:
        """Take a job on; it may be empty at first."""
        self._queues.setdefault(job.peer, PeerQueue(job.peer)).jobs += 1
        self._to_check.append(job)

    def add(self, job: Job, more: Iterable[Item]) -> None:
        """Queue items of a job that goes on. A sequence's items exist already: each gets its
        `on_done(False)` when the job is over or ends. Any other iterable is pulled item by item when
        its turn comes (what is never pulled is never told); one that raises fails the job."""
        ready = more if isinstance(more, Sequence) else None
        if job.active and job.closed:
            raise ValueError(f"{job.label} was closed: nothing may follow")
        if not job.active:
            for item in ready or ():
                self._tell(job, item, False)
        elif ready is None:
            job.waiting.append(iter(more))
        else:
            job.waiting.extend(ready)
        if job.active and job.waiting:
            job.begun = True
            self._ring.add(self._queues[job.peer], job)

    def close(self, job: Job) -> None:
        """No more items."""
        job.closed = True
        self._maybe_finish(job)

    def fail(self, job: Job, error: TransferError) -> None:
        """Stop posting; the job finishes when its handles settled or `settle` seconds passed."""
        if job.active:
            self._stop(job, error, ())

    def abandon(self, error: TransferError) -> None:
        """The agent is about to be destroyed: every job ends now, whatever is in flight."""
        for job in list(self._to_check):
            self.fail(job, error.about(peer=job.peer))
            if not job.finished:
                self._finish(job)

    def settle_reads(self) -> None:
        """The agent was destroyed: what it was reading can not arrive any more. (What it wrote may.)"""
        for flight in (*self._window.fresh, *self._window.late):
            if flight.job.operation == "READ":
                self._window.land(flight)
                self._maybe_finish(flight.job)
                self._forget(flight.queue)

    def step(self) -> bool:
        """Poll what flies, post what fits, enforce deadlines. True when something changed."""
        now = self._clock()
        changed = self._poll(self._window.fresh)
        changed |= self._post(now)
        if now >= self._next_check:
            self._next_check = now + CHECK_EVERY
            changed |= self._check(now)
        return changed

    # --- what flies ---------------------------------------------------------------------------

    def _poll(self, flights: list[Flight]) -> bool:
        looked = [self._look(flight) for flight in flights]
        return any(looked)

    def _look(self, flight: Flight) -> bool:
        """Poll one handle; True when it is done or errored."""
        job, item = flight.job, flight.item
        try:
            if self._agent.poll(flight.handle) is HandleState.ACTIVE:
                return False
        except AgentFailure as error:
            self._window.land(flight)
            job.lost += 1
            self._stop(job, error, () if flight.told else (item,))
        else:
            self._window.land(flight)
            job.bytes_done += item.nbytes
            self.bytes_moved += item.nbytes
            self.on_landed(self._clock() - flight.posted_at)
            with suppress(AgentFailure):  # the bytes are there; a list that stays costs memory only
                self._agent.release(flight.handle)
                for made in flight.lists:
                    self._agent.release_prepared(made)
            if not flight.told:
                self._tell(job, item, True)
            self._maybe_finish(job)
        self._forget(flight.queue)
        return True

    def _check(self, now: float) -> bool:
        """Late handles and deadlines."""
        self._window.age(now)
        changed = self._poll(self._window.late)
        for _ in range(min(len(self._to_check), CHECK_JOBS)):
            job = self._to_check.popleft()
            if job.error is None and not job.finished and now > job.deadline:
                self.fail(job, DeadlineExceeded(f"{job.label} did not finish in time", peer=job.peer))
                changed = True
            if not job.finished and now > job.settle_by:
                self._finish(job)
                changed = True
            if not job.finished:
                self._to_check.append(job)
        return changed

    # --- what waits ---------------------------------------------------------------------------

    def _post(self, now: float) -> bool:
        changed, posted, waited = False, False, 0
        until = now + POST_TURN
        while waited < len(self._ring):
            queue = self._ring.first
            job = queue.front()
            if job is None:
                self._ring.remove(queue)
                continue
            item = self._pull(job)
            if item is None:
                changed = True
                if job.queued:
                    queue.leave(job)
                self._maybe_finish(job)
            elif posted and self._clock() > until:
                break
            elif not self._window.admits(queue, item):
                self._ring.pass_on()
                waited += 1
            elif self._ring.pay(queue, item):
                changed = posted = True
                waited = 0
                job.waiting.popleft()
                queue.next_job()
                self._post_one(job, queue, item, now)
            else:
                waited = 0
        return changed

    def _pull(self, job: Job) -> Item | None:
        """The next item of a job, left at the head of its queue; None when it has none now."""
        try:
            return job.head()
        except TransferError as error:
            self.fail(job, error)
        except Exception as error:
            logger.exception("%s: what is to be moved could not be planned", job.label)
            self.fail(job, TransferError(f"what is to be moved could not be planned: {error!r}", peer=job.peer))
        return None

    def _post_one(self, job: Job, queue: PeerQueue, item: Item, now: float) -> None:
        try:
            handle, lists = post(self._agent, job, item)
        except AgentFailure as error:
            job.lost += error.posted
            self._stop(job, error, (item,))
            return
        job.handles += 1
        job.pieces += item.pieces
        if job.posted_at is None:
            job.posted_at = now
        self._window.add(flight := Flight(job, queue, item, handle, lists, now))
        self._copies = self._look(flight)  # and what waits for such a one need not wait a turn

    # --- how a job ends -----------------------------------------------------------------------

    def _stop(self, job: Job, error: TransferError, failed: tuple[Item, ...]) -> None:
        """End a job (unless it ends already); `failed` and what waits will not be moved."""
        if job.active:
            job.error = error
            error.bytes_done = job.bytes_done
            job.settle_by = self._clock() + self._settle
            failed += tuple(w for w in job.waiting if isinstance(w, Batch | Prepped))
            job.waiting.clear()
        for item in failed:
            self._tell(job, item, False)
        self._maybe_finish(job)

    def _tell(self, job: Job, item: Item, moved: bool) -> None:
        try:
            if item.on_done is not None:
                item.on_done(moved)
        except Exception as error:  # of this job's owner: the other jobs go on
            logger.exception("%s: on_done failed", job.label)
            self.fail(job, TransferError(f"a completion could not be handled: {error!r}", peer=job.peer))

    def _maybe_finish(self, job: Job) -> None:
        if job.in_flight:
            return
        if not job.finished and (job.error is not None or (job.closed and not job.waiting)):
            self._finish(job)
        elif job.finished and not job.drained and job.settled:
            job.drained = True
            job.on_drained(job)

    def _finish(self, job: Job) -> None:
        for flight in self._window.of(job) if job.in_flight else ():
            flight.told = True
            self._tell(job, flight.item, False)
        job.finished = True
        self._window.live -= job.in_flight
        (queue := self._queues[job.peer]).jobs -= 1
        job.drained = job.settled
        if job.error is not None:
            job.error.bytes_done = max(job.error.bytes_done, job.bytes_done)
        self._forget(queue)
        job.on_finish(job)

    def _forget(self, queue: PeerQueue) -> None:
        if not queue.jobs and not queue.flights:
            self._queues.pop(queue.peer, None)
