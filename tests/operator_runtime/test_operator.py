"""The whole operator (Lease, credentials, supervisor) over the fake API server: takeover and clean end.

Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from runtime_world import pdcluster, small_decide

from pdoperator.domain.actions import Decision, Memory
from pdoperator.kube.fake import FakeKube
from pdoperator.kube.port import KubeError
from pdoperator.runtime.credentials import CA_SECRET
from pdoperator.runtime.lease import LeaseLost, LeaseTimes
from pdoperator.runtime.operator import Operator
from pdoperator.runtime.supervisor import Pace
from pdoperator.settings import OperatorSettings, parse

pytestmark = pytest.mark.looptime
TIMES = LeaseTimes(duration=2.0, renew=0.2, retry=0.05, margin=0.4)
PACE = Pace(resync=0.2, coalesce=0.0, backoff_first=0.05, backoff_max=0.1)


class Link:
    """An operator's way to the API, which can be cut. Answers under way are lost with it."""

    def __init__(self, kube: FakeKube) -> None:
        self.kube, self.cut = kube, False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.kube, name)

        async def through(*args: Any, **kwargs: Any) -> Any:
            if self.cut:
                raise KubeError(0, "Unreachable", "cut off")
            return await call(*args, **kwargs)

        return through


def operator(kube: Any, decide: Any = small_decide) -> Operator:
    settings = OperatorSettings(operator_namespace="ops", pod_name="op")
    made = Operator(kube, settings, decide, pace=PACE, times=TIMES)
    made.lease._clock = asyncio.get_running_loop().time
    return made


async def until(what: Callable[[], Any], timeout: float = 20.0) -> None:
    now = asyncio.get_running_loop().time
    deadline = now() + timeout
    while not what():
        assert now() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_a_cut_off_operator_stops_and_its_successor_goes_on_with_a_higher_term() -> None:
    kube = FakeKube()
    kube.put(pdcluster(replicas=2))
    terms: list[int] = []

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        terms.append(observed.term)
        return small_decide(observed, memory, settings)

    link = Link(kube)
    first, second = operator(link, decide), operator(kube, decide)
    running = asyncio.create_task(first.run())
    await until(lambda: len(kube.of("Pod")) == 2)
    successor = asyncio.create_task(second.run())
    await asyncio.sleep(2.5)  # without a renewal it would be lost
    assert first.lease.held() and not second.lease.held()
    link.cut = True
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(running, 20.0)
    await first.stop()
    await until(second.lease.held)
    kube.remove(("v1", "Pod", "user", "a-prefill-0-0-abc-0"))
    await until(lambda: len(kube.of("Pod")) == 2)
    assert terms == sorted(terms) and set(terms) == {1, 2}
    successor.cancel()
    await asyncio.wait({successor})
    await second.stop()
    assert kube.of("Lease")[0]["spec"]["holderIdentity"] == ""


async def test_after_a_clean_stop_nothing_runs_any_more() -> None:
    kube = FakeKube()
    kube.put(pdcluster())
    before = asyncio.all_tasks()
    one = operator(kube)
    running = asyncio.create_task(one.run())
    await until(lambda: len(kube.of("Pod")) == 2)
    running.cancel()
    await asyncio.wait({running})
    await one.stop()
    calls = len(kube.calls)
    await asyncio.sleep(0.5)
    assert len(kube.calls) == calls
    assert asyncio.all_tasks() == before


async def test_events_wake_and_health_tells_the_term() -> None:
    kube = FakeKube()
    one = operator(kube)
    assert "waiting" in one.health()
    kube.on_change.append(lambda event, obj: one.cluster_event(event, obj) if obj["kind"] == "PDCluster" else None)
    running = asyncio.create_task(one.run())
    await until(lambda: one.supervisor is not None and one.supervisor.age() is not None)
    kube.put(pdcluster(replicas=1))
    await until(lambda: len(kube.of("Pod")) == 1)
    assert one.health().endswith("term 1")
    running.cancel()
    await asyncio.wait({running})
    await one.stop()


async def test_without_the_right_to_its_own_secret_it_waits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.put(pdcluster())
    kube.faults.forbidden.add(("get", "secrets"))
    one = operator(kube)
    running = asyncio.create_task(one.run())
    await until(lambda: any(CA_SECRET in r.getMessage() for r in caplog.records))
    assert kube.of("Pod") == [] and not running.done()
    running.cancel()
    await asyncio.wait({running})
    await one.stop()


def test_settings_come_from_flags_then_environment_then_defaults() -> None:
    env = {"OPERATOR_NAMESPACE": "ops", "WATCH_NAMESPACES": "b,a", "DEFAULT_ROUTER_IMAGE": "r:1", "LOG_LEVEL": "debug"}
    made = parse(["--operator-namespace", "flag"], env)
    assert made.operator_namespace == "flag"
    assert (made.watch_namespaces, made.router_image, made.log_level) == (("a", "b"), "r:1", "DEBUG")
    assert parse(["--namespace", "x"], env).watch_namespaces == ("x",)
    assert parse([], {}).watch_namespaces == ()
    assert made.decide_settings().router_image == "r:1"
    with pytest.raises(SystemExit):
        parse(["--network-policy", "perhaps"], {})
