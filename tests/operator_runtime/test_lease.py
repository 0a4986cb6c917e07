"""Who may act: one holder, a higher term each time, silence before a takeover. Virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdoperator.kube.fake import FakeKube
from pdoperator.kube.port import KubeError
from pdoperator.runtime.lease import Lease, LeaseLost, LeaseTimes

pytestmark = pytest.mark.looptime


def lease(kube: Any, identity: str) -> Lease:
    loop = asyncio.get_running_loop()
    return Lease(kube, "ops", identity, LeaseTimes(), clock=loop.time, wall=loop.time)


def now() -> float:
    return asyncio.get_running_loop().time()


class Cut:
    """A KubePort whose link can be cut: what an operator on an isolated node sees."""

    def __init__(self, kube: FakeKube) -> None:
        self.kube, self.cut = kube, False

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            raise KubeError(0, "Unreachable", "cut off")
        return getattr(self.kube, name)


async def test_each_holder_has_a_higher_term_and_a_released_lease_is_free_at_once(kube: FakeKube) -> None:
    terms = []
    for i in range(3):
        one = lease(kube, f"op{i}")
        terms.append(await one.acquire())
        assert one.held()
        await one.release()
        assert not one.held()
    assert terms == [1, 2, 3]
    assert now() < 1.0
    spec = kube.of("Lease")[0]["spec"]
    assert (spec["leaseTransitions"], spec["holderIdentity"]) == (3, "")


async def test_a_crashed_holder_is_waited_for_until_its_lease_ran_out(kube: FakeKube) -> None:
    first, second = lease(kube, "first"), lease(kube, "second")
    await first.acquire()
    await second.acquire()
    assert 15.0 <= now() <= 17.0
    assert (first.held(), second.held(), second.term) == (False, True, 2)


async def test_a_living_holder_is_never_overtaken(kube: FakeKube) -> None:
    first, second = lease(kube, "first"), lease(kube, "second")
    await first.acquire()
    keeper = asyncio.create_task(first.keep())
    waiter = asyncio.create_task(second.acquire())
    await asyncio.sleep(300)
    assert first.held() and not waiter.done() and not keeper.done()
    keeper.cancel()
    await waiter
    assert second.term == 2


async def test_a_holder_cut_off_from_the_api_stops_before_its_successor_starts(kube: FakeKube) -> None:
    link = Cut(kube)
    first, second = lease(link, "first"), lease(kube, "second")
    await first.acquire()
    keeper = asyncio.create_task(first.keep())
    waiter = asyncio.create_task(second.acquire())
    await asyncio.sleep(60)
    link.cut = True
    both = 0
    stopped = started = None
    for _ in range(3000):
        await asyncio.sleep(0.01)
        both += first.held() and second.held()
        stopped = stopped or (now() if not first.held() else None)
        started = started or (now() if second.held() else None)
    assert both == 0
    assert stopped is not None and started is not None and stopped < started
    with pytest.raises(LeaseLost):
        await keeper
    await waiter


async def test_a_renewal_that_hangs_is_tried_again_and_never_outlasts_the_lease(kube: FakeKube) -> None:
    first = lease(kube, "first")
    await first.acquire()
    keeper = asyncio.create_task(first.keep())
    await asyncio.sleep(3)
    kube.faults.delay = 1000.0  # each call hangs for longer than any client's own limit
    for _ in range(400):
        await asyncio.sleep(0.05)
        if keeper.done():
            break
    with pytest.raises(LeaseLost):
        await keeper
    assert now() <= LeaseTimes().duration - LeaseTimes().margin + 0.2  # acquired at 0

    second = lease(kube, "second")
    kube.faults.delay = 0.0
    await second.acquire()
    keeper = asyncio.create_task(second.keep())
    await asyncio.sleep(3)
    kube.faults.delay = 1000.0
    asyncio.get_running_loop().call_later(5.0, setattr, kube.faults, "delay", 0.0)
    await asyncio.sleep(60)
    assert second.held() and not keeper.done()  # one hung call did not cost it
    keeper.cancel()


async def test_a_holder_that_finds_another_name_stops_at_once(kube: FakeKube) -> None:
    first = lease(kube, "first")
    await first.acquire()
    keeper = asyncio.create_task(first.keep())
    taken = kube.of("Lease")[0]
    spec = {**taken["spec"], "holderIdentity": "thief", "leaseTransitions": 9}
    kube.put({**taken, "spec": spec})
    with pytest.raises(LeaseLost):
        await keeper
    assert now() <= 6.0 and not first.held()


async def test_one_of_two_that_start_together_wins(kube: FakeKube) -> None:
    kube.faults.delay = 0.05
    one, two = lease(kube, "one"), lease(kube, "two")
    tasks = {asyncio.create_task(one.acquire()), asyncio.create_task(two.acquire())}
    await asyncio.wait(tasks, timeout=5.0)
    assert sorted([one.held(), two.held()]) == [False, True]
    for task in tasks:
        task.cancel()


async def test_short_api_trouble_does_not_cost_the_lease(kube: FakeKube) -> None:
    link = Cut(kube)
    first = lease(link, "first")
    await first.acquire()
    keeper = asyncio.create_task(first.keep())
    for _ in range(5):
        await asyncio.sleep(20)
        link.cut = True
        await asyncio.sleep(5)
        link.cut = False
        assert first.held()
    assert not keeper.done()
    keeper.cancel()


async def test_a_lost_answer_to_a_renewal_is_recognised_as_our_own(kube: FakeKube) -> None:
    first = lease(kube, "first")
    await first.acquire()
    keeper = asyncio.create_task(first.keep())
    # The renewal was stored but its answer lost: our next one conflicts with our own record.
    kube.put(kube.of("Lease")[0])
    await asyncio.sleep(30)
    assert first.held() and not keeper.done()
    keeper.cancel()
