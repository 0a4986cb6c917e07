"""The mover: windows, fairness, deadlines, and nothing reported before it has settled."""

from __future__ import annotations

import numpy as np
import pytest

from pdtransfer.agent.fake import FakeHub
from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import DeadlineExceeded
from pdtransfer.mover.executor import HANDLE_BYTES, HANDLE_PIECES, PEER_HANDLES, Batch, Job, Mover, batches
from pdtransfer.plan import Segment, TransferPlan

MIB = 1 << 20


class Bench:
    """A mover over a fake agent with two peers, and a clock that is moved by hand."""

    def __init__(self, **window) -> None:
        self.hub = FakeHub()
        self.agent = self.hub.agent("source")
        self.memory = np.arange(16 * MIB, dtype=np.uint8)
        rows = np.array([[self.memory.ctypes.data, self.memory.nbytes, 0]], dtype=np.uint64)
        self.agent.register(rows, MemoryKind.DRAM)
        self.targets = {}
        for name in ("a", "b"):
            target = self.hub.agent(name)
            memory = np.zeros(16 * MIB, dtype=np.uint8)
            target.register(np.array([[memory.ctypes.data, memory.nbytes, 0]], dtype=np.uint64), MemoryKind.DRAM)
            self.agent.peers.add(name)
            self.targets[name] = memory
        self.now = 0.0
        self.mover = Mover(
            self.agent,
            window_bytes=window.get("window_bytes", 64 * MIB),
            window_ops=window.get("window_ops", 16),
            settle=1.0,
            clock=lambda: self.now,
        )
        self.ended: list[Job] = []
        self.drained: list[Job] = []

    def batch(self, peer: str, size: int, at: int = 0) -> Batch:
        def row(base: int) -> np.ndarray:
            return np.array([[base + at, size, 0]], dtype=np.uint64)

        return Batch(
            row(self.memory.ctypes.data),
            MemoryKind.DRAM,
            row(self.targets[peer].ctypes.data),
            MemoryKind.DRAM,
            size,
        )

    def job(self, peer: str, count: int, size: int = 4096, deadline: float = 100.0) -> Job:
        job = Job(f"job {peer}", peer, deadline, self.ended.append, self.drained.append)
        self.mover.start(job)
        self.mover.add(job, (self.batch(peer, size, i * size) for i in range(count)))
        self.mover.close(job)
        return job

    def run(self, steps: int = 200) -> None:
        for _ in range(steps):
            self.now += 0.01
            self.mover.step()


def test_a_job_ends_once_with_all_its_bytes():
    bench = Bench()
    job = bench.job("a", 10)
    bench.run()
    assert bench.ended == [job] and job.bytes_done == 10 * 4096 and job.settled
    assert np.array_equal(bench.targets["a"][:40960], bench.memory[:40960])
    assert not bench.mover.busy and not bench.drained


@pytest.mark.parametrize(
    ("window", "most"),
    # The window, and one handle for the peer that would have none.
    [({"window_ops": 3}, 3 + 1), ({"window_bytes": 8192}, 2 + 1), ({}, 2 * PEER_HANDLES)],
)
def test_the_window_bounds_handles_and_bytes_in_flight(window, most):
    bench = Bench(**window)
    bench.agent.faults.delay_polls = 3
    bench.job("a", 20)
    bench.job("b", 20)
    seen = 0
    for _ in range(200):
        bench.now += 0.001
        bench.mover.step()
        seen = max(seen, bench.mover.handles_in_flight)
    assert seen == most
    assert len(bench.ended) == 2


def test_one_stalled_peer_costs_only_itself():
    bench = Bench(window_ops=4)
    bench.agent.faults.stall.update({1, 2, 3, 4})
    slow = bench.job("a", 8)
    bench.mover.step()  # the stalled handles fill the whole window
    fast = bench.job("b", 8)
    bench.run(300)
    assert bench.ended == [fast] and slow.in_flight == PEER_HANDLES
    assert fast.bytes_done == 8 * 4096


def test_a_deadline_stops_new_posts_waits_to_settle_and_reports_what_did_not():
    bench = Bench()
    bench.agent.faults.stall.add(2)
    job = bench.job("a", 30, deadline=0.005)
    bench.run(50)
    assert isinstance(job.error, DeadlineExceeded) and not bench.ended  # settling: 1 s
    posts = bench.agent.posts
    bench.run(100)
    assert bench.ended == [job] and not job.settled and not bench.drained
    assert bench.agent.posts == posts < 30
    assert job.error.bytes_done == job.bytes_done
    bench.hub.unstall("source")
    bench.run(10)
    assert bench.drained == [job] and job.settled and bench.ended == [job]


def test_an_error_is_reported_only_after_its_siblings_landed():
    bench = Bench()
    bench.agent.faults.delay_polls = 20
    bench.agent.faults.error.add(2)
    job = bench.job("a", 3)
    bench.run(5)
    assert job.error is not None and not bench.ended  # siblings still write
    bench.run(30)
    assert bench.ended == [job] and job.lost == 1 and not job.settled
    bench.run(50)
    assert not bench.drained  # the errored one may land at any time


def test_a_failing_job_does_not_disturb_the_jobs_of_other_peers():
    bench = Bench()
    victim = bench.job("b", 5)
    broken = Job(
        "broken", "a", 100.0, lambda job: bench.mover.fail(victim, DeadlineExceeded("with it")), lambda job: None
    )
    bench.mover.start(broken)
    bench.mover.add(broken, iter((bench.batch("a", 64),)))
    bench.agent.faults.fail_post.update({1, 2})
    bench.run(20)
    assert broken.finished and victim.finished and not bench.mover.busy


def test_plans_are_cut_into_handles_within_both_bounds():
    sizes = np.full(10000, 1024, dtype=np.uint64)
    big = np.full(5, 3 * MIB, dtype=np.uint64)
    for lengths in (sizes, big):
        rows = np.zeros((len(lengths), 3), dtype=np.uint64)
        rows[:, 1] = lengths
        rows[:, 0] = np.arange(len(lengths))
        plan = TransferPlan((Segment(MemoryKind.VRAM, MemoryKind.DRAM, "direct", rows, rows),))
        cut = list(batches(plan, lambda k: k, lambda k: k))
        assert sum(b.nbytes for b in cut) == int(lengths.sum())
        assert np.array_equal(np.concatenate([b.local for b in cut]), rows)
        assert all(len(b.local) <= HANDLE_PIECES for b in cut)
        assert all(b.nbytes <= HANDLE_BYTES or len(b.local) == 1 for b in cut)
        assert {(b.local_kind, b.remote_kind) for b in cut} == {(MemoryKind.VRAM, MemoryKind.DRAM)}
