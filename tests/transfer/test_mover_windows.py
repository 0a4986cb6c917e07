"""The mover: windows, fairness, deadlines, and nothing reported before it has settled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from mover_kit import MIB, Bench, Lists, lazy_job

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import DeadlineExceeded
from pdtransfer.mover.jobs import HANDLE_BYTES, HANDLE_PIECES, Job, Prepped, batches, prepped
from pdtransfer.mover.window import PEER_HANDLES
from pdtransfer.plan import Segment, TransferPlan


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


def test_what_a_post_moved_itself_is_over_in_the_same_step():
    """Over CMA the post copies: the job ends, and what waited for its handles goes on, without another turn."""
    bench = Bench()
    bench.agent.faults.delay_polls = 0
    told: list[bool] = []
    job = Job("job a", "a", 100.0, bench.ended.append, bench.drained.append)
    bench.mover.start(job)
    count = PEER_HANDLES + 2  # more than may be in flight to one peer
    bench.mover.add(job, (replace(bench.batch("a", 4096, i * 4096), on_done=told.append) for i in range(count)))
    bench.mover.close(job)
    bench.mover.step()
    assert told == [True] * count and bench.ended == [job] and job.settled
    assert not bench.mover.busy and bench.mover.handles_in_flight == 0
    assert np.array_equal(bench.targets["a"][: count * 4096], bench.memory[: count * 4096])


def test_a_handle_that_errors_as_soon_as_it_is_posted_fails_its_job_alone():
    bench = Bench()
    bench.agent.faults.delay_polls = 0
    bench.agent.faults.error.add(1)
    bad, good = bench.job("a", 1), bench.job("b", 1)
    bench.mover.step()
    assert bench.agent.faults.seen == ["error 1"]
    assert bench.ended == [bad, good] and bad.error is not None and not bad.settled
    assert good.error is None and good.bytes_done == 4096


def test_one_stalled_peer_costs_only_itself():
    bench = Bench(window_ops=4)
    bench.agent.faults.stall.update({1, 2, 3, 4})
    slow = bench.job("a", 8)
    bench.mover.step()  # the stalled handles fill the whole window
    fast = bench.job("b", 8)
    bench.run(300)
    assert bench.ended == [fast] and slow.in_flight == PEER_HANDLES
    assert fast.bytes_done == 8 * 4096
    assert bench.agent.posts == PEER_HANDLES + 8  # also when only late handles are left


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


@pytest.mark.parametrize("window", [{}, {"window_ops": 3}, {"window_ops": 1}, {"window_bytes": 9000}])
def test_peers_share_within_a_factor_of_two(window):
    """Two peers with all they want to send, one in large items and one in small ones."""
    bench = Bench(**window)
    bench.agent.faults.delay_polls = 2
    a, b = Lists(bench, "a"), Lists(bench, "b")

    def halves(lists: Lists) -> Iterator[Prepped]:
        """Two items for each one of the other peer's: half the bytes each."""
        return (replace(lists.item(0), nbytes=2 << 20) for _ in range(4000))

    big = lazy_job(bench, "a", (replace(a.item(0), nbytes=4 << 20) for _ in range(4000)))
    small = lazy_job(bench, "b", halves(b))
    for _ in range(600):
        bench.now += 0.001
        bench.mover.step()
    assert min(big.bytes_done, small.bytes_done) > 100 << 20
    assert 0.5 <= big.bytes_done / small.bytes_done <= 2


def test_a_peer_with_one_request_is_served_beside_one_with_thousands():
    bench = Bench(window_ops=4)
    a, b = Lists(bench, "a"), Lists(bench, "b")
    for _ in range(2000):
        lazy_job(bench, "a", a.items(5))
    bench.run(5)
    lone = lazy_job(bench, "b", b.items(5))
    bench.run(10)
    assert bench.ended.count(lone) == 1


def test_handles_that_fly_for_long_are_still_settled():
    """Late handles leave the hot loop and the shared window, not the books."""
    bench = Bench(window_ops=2)
    bench.agent.faults.stall_all = True
    lists = Lists(bench, "a")
    job = lazy_job(bench, "a", lists.items(2))
    bench.run(150)  # longer than STALLED_AFTER
    other = Lists(bench, "b")
    bench.agent.faults.stall_all = False
    fast = lazy_job(bench, "b", other.items(20))
    bench.run(20)
    assert bench.ended == [fast] and bench.mover.handles_in_flight == 2 and bench.mover.flies_to("a")
    bench.hub.unstall("source")
    bench.run(3)
    assert bench.ended == [fast, job] and not bench.mover.flies_to("a") and not bench.mover.busy


def test_deadlines_of_more_jobs_than_one_check_looks_at():
    bench = Bench()
    bench.agent.faults.stall_all = True
    lists = Lists(bench, "a")
    jobs = [lazy_job(bench, "a", lists.items(1), deadline=0.5) for _ in range(1000)]
    bench.run(100)
    assert all(isinstance(j.error, DeadlineExceeded) for j in jobs)
    assert len(bench.ended) == 1000 - PEER_HANDLES  # those in flight settle, or are given up later
    bench.run(120)
    assert len(bench.ended) == 1000 and not bench.mover.busy


@pytest.mark.parametrize(
    ("unit", "dense"), [(1024, False), (16384, False), (64, False), (16384, True), (8 << 20, True)]
)
def test_index_arrays_are_cut_into_handles_within_both_bounds(unit, dense):
    mine = np.arange(10000, dtype=np.int32)
    theirs = mine.copy()
    theirs[5000:] += 7  # one break
    cut = list(prepped("l", mine, "r", theirs, unit, dense=dense))
    assert np.array_equal(np.concatenate([c.local_indices for c in cut]), mine)
    assert np.array_equal(np.concatenate([c.remote_indices for c in cut]), theirs)
    assert sum(c.nbytes for c in cut) == 10000 * unit
    assert all(c.nbytes <= max(HANDLE_BYTES, unit) and c.pieces <= HANDLE_PIECES for c in cut)
    if dense:
        broken = [i for i, c in enumerate(cut) if 5000 in c.local_indices[1:]]
        assert [c.pieces for c in cut] == [2 if i in broken else 1 for i in range(len(cut))]
    with pytest.raises(ValueError, match="remote rows"):
        next(prepped("l", mine, "r", theirs[1:], unit))


@pytest.mark.parametrize(
    ("polls", "jobs", "sizes"),
    [
        # Alone: 32 MiB, so that two fit the window, and 64 once a post was seen to copy by itself. Two in turn: 4 MiB.
        (0, 1, [32, 64, 64]),
        (3, 1, [32, 32, 32]),
        (0, 2, [4, 4, 4]),
    ],
)
def test_handles_are_large_only_while_one_job_posts_alone(polls, jobs, sizes):
    bench = Bench()
    bench.agent.faults.delay_polls = polls
    seen: list[int] = []

    def items(lists: Lists) -> Iterator[Prepped]:
        for item in lists.items(3):
            seen.append(bench.mover.handle_bytes() // MIB)
            yield replace(item, nbytes=4 * MIB)

    large = (replace(item, nbytes=4 * MIB) for item in Lists(bench, "b").items(6))
    other = lazy_job(bench, "b", large) if jobs == 2 else None
    job = lazy_job(bench, "a", items(Lists(bench, "a")))
    bench.run(20)
    assert job in bench.ended and (other is None or other in bench.ended)
    assert seen == sizes
