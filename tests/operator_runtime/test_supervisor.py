"""Tasks, wake-ups, backoff and isolation, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from runtime_world import pdcluster

from pdoperator.api import names
from pdoperator.kube.fake import FakeKube
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.runtime.carried import ClusterState, Result
from pdoperator.runtime.supervisor import Pace, Supervisor, backoff

pytestmark = pytest.mark.looptime


class Recorder:
    """Stands in for the Reconciler: records who ran when, and answers as told per name."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, float]] = []
        self.active: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.behave: dict[str, Callable[[int], Any]] = {}
        self.takes: dict[str, float] = {}
        self.forgotten: list[str] = []
        self.peeks: list[float] = []
        self.news_at: set[int] = set()

    async def once(self, state: ClusterState) -> Result:
        name = state.name
        self.runs.append((name, asyncio.get_running_loop().time()))
        self.active[name] = self.active.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.active[name])
        try:
            await asyncio.sleep(self.takes.get(name, 0.0))
            answer = self.behave.get(name, lambda n: Result(requeue_after=1000.0))(len(self.times(name)))
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.active[name] -= 1

    async def peek(self, state: ClusterState) -> bool:
        self.peeks.append(asyncio.get_running_loop().time())
        return len(self.peeks) in self.news_at

    async def forget(self, uid: str) -> None:
        self.forgotten.append(uid)

    def times(self, name: str) -> list[float]:
        return [t for n, t in self.runs if n == name]


def supervisor(kube: FakeKube, recorder: Recorder, **pace: Any) -> Supervisor:
    settings = {"resync": 10_000.0, "max_requeue": 10_000.0, **pace}
    return Supervisor(kube, recorder, pace=Pace(**settings))  # type: ignore[arg-type]


async def started(sup: Supervisor) -> asyncio.Task[None]:
    task = asyncio.create_task(sup.run())
    await asyncio.sleep(0.01)
    return task


async def ended(sup: Supervisor, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    await sup.stop()


async def test_many_wake_ups_while_one_reconcile_runs_lead_to_one_more(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    recorder = Recorder()
    recorder.takes["a"] = 5.0
    sup = supervisor(kube, recorder)
    task = await started(sup)
    for _ in range(20):
        sup.wake(obj["metadata"]["uid"])
        await asyncio.sleep(0.1)
    await asyncio.sleep(100)
    assert len(recorder.times("a")) == 2
    assert recorder.most == {"a": 1}
    await ended(sup, task)


async def test_the_timer_looks_again_when_nothing_wakes(kube: FakeKube) -> None:
    kube.put(pdcluster())
    recorder = Recorder()
    recorder.behave["a"] = lambda n: Result(requeue_after=10.0)
    sup = supervisor(kube, recorder, coalesce=0.0)
    task = await started(sup)
    await asyncio.sleep(35)
    assert [round(t) for t in recorder.times("a")] == [0, 10, 20, 30]
    await ended(sup, task)


async def test_failures_back_off_exponentially_and_events_do_not_shorten_it_but_a_new_spec_does(
    kube: FakeKube,
) -> None:
    obj = kube.put(pdcluster())
    recorder = Recorder()
    recorder.behave["a"] = lambda n: Result(failed=True, blind=True)
    sup = supervisor(kube, recorder, backoff_first=8.0, backoff_max=64.0)
    task = await started(sup)
    for _ in range(3000):
        sup.wake(obj["metadata"]["uid"])  # a crash-looping pod wakes us all the time
        await asyncio.sleep(0.1)
    times = recorder.times("a")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    for gap, whole in zip(gaps, [8, 16, 32, 64, 64], strict=False):
        assert whole * 0.5 <= gap <= whole + 0.3
    before = len(recorder.times("a"))
    while len(recorder.times("a")) == before:  # noqa: ASYNC110 (virtual time)
        await asyncio.sleep(0.1)
    before += 1  # it has just run: the next try of its own comes after 32 s or more
    obj["spec"]["prefill"]["replicas"] = 5
    sup.cluster_event("MODIFIED", kube.put(obj))
    await asyncio.sleep(0.5)
    assert len(recorder.times("a")) == before + 1
    await ended(sup, task)


async def test_between_looks_at_a_calm_pdcluster_it_peeks_and_news_or_a_wake_up_ends_that(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    recorder = Recorder()
    recorder.behave["a"] = lambda n: Result(requeue_after=1.0, peeks=3)
    sup = supervisor(kube, recorder, coalesce=0.0)
    task = await started(sup)
    await asyncio.sleep(4.5)
    assert [round(t) for t in recorder.times("a")] == [0, 4]
    assert [round(t) for t in recorder.peeks] == [1, 2, 3]
    recorder.news_at = {5}  # the second peek after the look at 4
    await asyncio.sleep(2.0)
    assert [round(t) for t in recorder.times("a")] == [0, 4, 6]
    sup.wake(obj["metadata"]["uid"])
    await asyncio.sleep(0.1)
    assert len(recorder.times("a")) == 4
    await ended(sup, task)


async def test_a_status_only_change_wakes_nobody(kube: FakeKube) -> None:
    kube.put(pdcluster())
    recorder = Recorder()
    sup = supervisor(kube, recorder)
    task = await started(sup)
    await asyncio.sleep(1)
    status = {"apiVersion": PDCLUSTER_API, "kind": "PDCluster", "metadata": {"name": "a", "namespace": "user"}}
    stored = await kube.apply({**status, "status": {"seen": 1}}, subresource="status")
    sup.cluster_event("MODIFIED", stored)
    await asyncio.sleep(1)
    assert len(recorder.runs) == 1
    await ended(sup, task)


async def test_our_own_gate_wakes_nobody_but_a_restarted_container_does(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    uid = obj["metadata"]["uid"]
    recorder = Recorder()
    sup = supervisor(kube, recorder)
    task = await started(sup)
    pod: dict[str, Any] = {
        "metadata": {"uid": "p", "labels": {names.LABEL_CLUSTER_UID: uid}, "resourceVersion": "1"},
        "status": {"conditions": [], "containerStatuses": [{"name": "engine", "restartCount": 0}]},
    }
    sup.pod_event(None, pod)
    await asyncio.sleep(1)
    assert len(recorder.runs) == 2
    pod["status"]["conditions"] = [{"type": names.GATE_KV_WIRED, "status": "True"}]
    pod["metadata"]["resourceVersion"] = "2"
    sup.pod_event("MODIFIED", pod)
    await asyncio.sleep(1)
    assert len(recorder.runs) == 2
    pod["status"]["containerStatuses"] = [{"name": "engine", "restartCount": 1}]
    sup.pod_event("MODIFIED", pod)
    await asyncio.sleep(1)
    assert len(recorder.runs) == 3
    sup.pod_event("DELETED", pod)
    await asyncio.sleep(1)
    assert len(recorder.runs) == 4
    await ended(sup, task)


async def test_broken_and_hanging_clusters_do_not_delay_the_others(kube: FakeKube) -> None:
    for name in ["bug", "hang", *(f"ok{i}" for i in range(20))]:
        kube.put(pdcluster(name))
    recorder = Recorder()
    recorder.behave["bug"] = lambda n: ValueError("a bug in decide()")
    recorder.takes["hang"] = 1e6
    for i in range(20):
        recorder.behave[f"ok{i}"] = lambda n: Result(requeue_after=1.0)
    sup = supervisor(kube, recorder, deadline=30.0, concurrency=4)
    task = await started(sup)
    await asyncio.sleep(60)
    assert not task.done()  # neither of them ended the operator
    for i in range(20):
        assert len(recorder.times(f"ok{i}")) >= 50
    assert len(recorder.times("hang")) == 2  # cut off at its deadline, then tried again
    await ended(sup, task)


async def test_no_more_than_the_cap_run_at_once(kube: FakeKube) -> None:
    for i in range(50):
        kube.put(pdcluster(f"c{i}"))
    recorder = Recorder()
    recorder.takes = {f"c{i}": 1.0 for i in range(50)}
    sup = supervisor(kube, recorder, concurrency=8)
    task = await started(sup)
    most = 0
    for _ in range(100):
        most = max(most, sum(recorder.active.values()))
        await asyncio.sleep(0.1)
    assert most == 8
    assert len(recorder.runs) == 50
    await ended(sup, task)


async def test_a_resync_finds_what_the_watch_missed(kube: FakeKube) -> None:
    recorder = Recorder()
    recorder.behave["gone"] = lambda n: Result(gone=n > 1, requeue_after=1000.0)
    sup = supervisor(kube, recorder, resync=30.0)
    task = await started(sup)
    kube.put(pdcluster("gone"))
    obj = kube.put(pdcluster("new"))
    await asyncio.sleep(40)
    assert {n for n, _ in recorder.runs} == {"gone", "new"}
    kube.remove((PDCLUSTER_API, "PDCluster", "user", "gone"))
    obj["spec"]["prefill"]["replicas"] = 9
    kube.put(obj)
    await asyncio.sleep(40)
    assert len(sup.uids) == 1 and len(recorder.forgotten) == 1
    assert len(recorder.times("new")) == 2
    await ended(sup, task)


async def test_a_failed_list_ends_no_task_and_the_loop_still_counts_as_alive(kube: FakeKube) -> None:
    kube.put(pdcluster())
    recorder = Recorder()
    sup = supervisor(kube, recorder, resync=10.0)
    task = await started(sup)
    kube.faults.broken.add(("list", "pdclusters"))
    await asyncio.sleep(100)
    age = sup.age()
    assert len(sup.uids) == 1
    assert age is not None and age <= 11.0
    await ended(sup, task)


async def test_a_deleted_pdcluster_is_cut_off_at_once(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    recorder = Recorder()
    recorder.takes["a"] = 1e6
    sup = supervisor(kube, recorder, deadline=1e7)
    task = await started(sup)
    sup.cluster_event("DELETED", obj)
    await asyncio.sleep(0.1)
    assert recorder.active["a"] == 0
    assert sup.uids == frozenset()
    await ended(sup, task)


def test_backoff_is_capped_and_jittered() -> None:
    pace = Pace(backoff_first=1.0, backoff_max=60.0)
    assert 0.5 <= backoff(1, pace) <= 1.0
    for _ in range(50):
        assert 30.0 <= backoff(1000, pace) <= 60.0
