"""What a job is made of: prepared lists and items that are pulled one by one, told once, and may follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from mover_kit import Bench, Lists, lazy_job

from pdtransfer.errors import LayoutMismatch
from pdtransfer.mover.jobs import Job, Prepped
from pdtransfer.mover.queues import PEER_JOBS
from pdtransfer.mover.window import PEER_HANDLES


def test_prepared_lists_serve_every_item_and_are_kept():
    bench = Bench()
    lists = Lists(bench, "a")
    job = lazy_job(bench, "a", lists.items(9))
    bench.run(50)
    assert bench.ended == [job] and (job.handles, job.pieces, job.bytes_done) == (9, 9, 9 * 4096)
    assert np.array_equal(bench.targets["a"][: 9 * 4096], bench.memory[: 9 * 4096])
    assert lists.told == [(n, True) for n in range(9)] and job.posted_at == 0.01
    assert not lists.local.released and not lists.remote.released


def test_a_backlog_of_thousands_of_jobs_pulls_only_what_may_fly():
    bench = Bench()
    bench.agent.faults.stall_all = True
    lists = [Lists(bench, peer) for peer in ("a", "b")]
    jobs = [lazy_job(bench, "ab"[i % 2], lists[i % 2].items(3)) for i in range(3000)]
    bench.run(20)
    assert all(of_peer.pulled <= PEER_HANDLES + PEER_JOBS for of_peer in lists)
    assert bench.agent.posts == 2 * PEER_HANDLES
    bench.agent.faults.stall_all = False
    bench.hub.unstall("source")
    bench.run(1500)
    assert len(bench.ended) == 3000 and all(j.bytes_done == 3 * 4096 for j in jobs)
    assert not bench.mover.busy and not bench.mover.handles_in_flight


def test_an_iterator_that_raises_fails_its_job_with_the_reason():
    bench = Bench()

    def broken(lists: Lists, error: Exception) -> Iterator[Prepped]:
        yield lists.item(1)
        raise error

    lists = Lists(bench, "a")
    refused = lazy_job(bench, "a", broken(lists, LayoutMismatch("page 7 is gone")))
    surprised = lazy_job(bench, "a", broken(lists, KeyError("layer")))
    fine = lazy_job(bench, "a", lists.items(3))
    bench.run(30)
    assert isinstance(refused.error, LayoutMismatch) and "page 7" in str(refused.error)
    assert surprised.error is not None and "KeyError('layer')" in str(surprised.error)
    assert fine.error is None and set(bench.ended) == {refused, surprised, fine} and len(bench.ended) == 3
    assert refused.settled and surprised.settled


def test_an_item_is_told_once_whatever_becomes_of_it():
    """Moved; refused at the post; errored; dropped unposted; given up in flight and landing late."""
    bench = Bench()
    lists = Lists(bench, "a")
    moved = lazy_job(bench, "a", [lists.item(0)])
    bench.run(3)
    bench.agent.faults.fail_post.add(2)
    refused = lazy_job(bench, "a", [lists.item(1), lists.item(2)])
    bench.run(3)
    bench.agent.faults.error.add(3)
    errored = lazy_job(bench, "a", [lists.item(3)])
    bench.run(3)
    bench.agent.faults.stall.add(4)
    late = lazy_job(bench, "a", [lists.item(4)], deadline=bench.now + 0.005)
    bench.run(150)  # deadline, then the settle time
    assert lists.told == [(0, True), (1, False), (2, False), (3, False), (4, False)]
    assert [j.settled for j in (moved, refused, errored, late)] == [True, True, False, False]
    assert bench.ended == [moved, refused, errored, late]
    bench.hub.unstall("source")
    bench.run(10)
    assert bench.drained == [late] and len(lists.told) == 5


def test_items_of_a_list_are_told_when_their_job_is_over_already_and_an_iterator_is_not_pulled():
    bench = Bench()
    lists = Lists(bench, "a")
    job = lazy_job(bench, "a", ())
    assert bench.ended == [job]
    bench.mover.add(job, [lists.item(5)])
    bench.mover.add(job, lists.items(3))
    bench.run(5)
    assert lists.told == [(5, False)] and not lists.pulled and not bench.agent.posts


def test_nothing_may_follow_a_close():
    bench = Bench()
    lists = Lists(bench, "a")
    job = lazy_job(bench, "a", lists.items(3))
    with pytest.raises(ValueError, match="nothing may follow"):
        bench.mover.add(job, [lists.item(5)])


def test_what_follows_from_a_completion_may_be_added_then():
    """A chain: each item's completion adds the next one, the last one closes."""
    bench = Bench()
    lists = Lists(bench, "a")
    job = Job("chain", "a", 100.0, bench.ended.append, bench.drained.append)

    def after(number: int) -> Prepped:
        item = lists.item(number)

        def done(moved: bool) -> None:
            if number < 4:
                bench.mover.add(job, [after(number + 1)])
            else:
                bench.mover.close(job)

        return replace(item, on_done=done)

    bench.mover.start(job)
    bench.mover.add(job, [after(0)])
    bench.run(30)
    assert bench.ended == [job] and job.bytes_done == 5 * 4096


def test_a_completion_that_raises_fails_its_job_only():
    bench = Bench()
    lists = Lists(bench, "a")

    def broken(moved: bool) -> None:
        raise RuntimeError("no such page")

    bad = lazy_job(bench, "a", [replace(lists.item(0), on_done=broken), lists.item(1)])
    good = lazy_job(bench, "a", lists.items(2))
    bench.run(20)
    assert bad.error is not None and "no such page" in str(bad.error) and good.error is None
    assert set(bench.ended) == {bad, good}
