"""Why a pod starts nothing is read from its events, seldom, for few pods, and only where one may."""

from __future__ import annotations

from typing import Any

import pytest

from pdoperator.api.conditions import Reason
from pdoperator.domain.actions import CreatePod, EmitEvent
from pdoperator.domain.observed import ClusterObject, Observed
from pdoperator.kube.execute import KubeExecutor
from pdoperator.kube.fake import FakeKube
from pdoperator.kube.observe import WARNINGS_MAX_AGE, Observer, problem_of
from pdoperator.kube.port import KubeError
from pdoperator.runtime.act import Actor

UID = "c-uid"
CLUSTER = ClusterObject("c", "ns", UID, 1, {}, None)
LABELS = {"pdcluster.io/cluster-uid": UID, "pdcluster.io/role": "prefill", "pdcluster.io/replica": "0"}


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": LABELS,
            "creationTimestamp": "1970-01-01T00:16:40Z", "ownerReferences": [{"uid": UID}],
        },
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Pending", **status},
    }  # fmt: skip


def event(name: str, about: str, message: str, at: str, kind: str = "Warning") -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "ns"}, "type": kind,
        "reason": "FailedMount", "message": message, "lastTimestamp": at, "involvedObject": {"uid": f"uid-{about}"},
    }  # fmt: skip


async def store(*objects: dict[str, Any]) -> FakeKube:
    kube = FakeKube()
    for o in objects:
        await kube.create(o)
    return kube


async def test_the_newest_warning_of_a_stuck_pod_comes_first_and_others_events_are_left_out() -> None:
    kube = await store(
        pod("a"),
        event("e1", "a", "old", "1970-01-01T00:16:45Z"),
        event("e2", "a", 'configmap "gone" not found', "1970-01-01T00:16:50Z"),
        event("e3", "a", "Pulled", "1970-01-01T00:16:59Z", kind="Normal"),
        event("e4", "b", "of another pod", "1970-01-01T00:16:59Z"),
    )
    found = await Observer(kube).children(CLUSTER, now=1015.0)
    assert found.pods[0].warnings == (("FailedMount", 'configmap "gone" not found'), ("FailedMount", "old"))


def event_lists(kube: FakeKube) -> int:
    return kube.calls.count(("list", "events"))


async def test_events_are_not_read_for_pods_that_are_young_or_running_and_not_at_every_look() -> None:
    running = {"phase": "Running", "containerStatuses": [{"name": "engine", "state": {"running": {}}}]}
    kube = await store(pod("a"), pod("b", **running))
    clock = [0.0]
    observer = Observer(kube, clock=lambda: clock[0])
    await observer.children(CLUSTER, now=1005.0)
    assert event_lists(kube) == 0
    for _ in range(5):
        await observer.children(CLUSTER, now=1015.0)
    assert event_lists(kube) == 1  # a alone, once
    clock[0] += WARNINGS_MAX_AGE
    await observer.children(CLUSTER, now=1026.0)
    assert event_lists(kube) == 2


async def test_four_of_many_stuck_pods_are_asked_about() -> None:
    kube = await store(*(pod(f"p{i}") for i in range(50)))
    await Observer(kube).children(CLUSTER, now=1015.0)
    assert event_lists(kube) == 4


async def test_without_the_right_to_list_events_reconciling_goes_on() -> None:
    kube = await store(pod("a"))
    kube.faults.forbidden.add(("list", "events"))
    assert (await Observer(kube).children(CLUSTER, now=1015.0)).pods[0].warnings is None


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, 'pods is forbidden: User "operator" cannot create resource "pods"', Reason.API_FORBIDDEN),
        (403, 'pods "x" is forbidden: exceeded quota: small, requested: pods=1', Reason.ADMISSION_REFUSED),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged', Reason.ADMISSION_REFUSED),
        (400, 'admission webhook "policy.example" denied the request: no latest tags', Reason.ADMISSION_REFUSED),
        (403, "unable to create new content in namespace ns because it is being terminated",
         Reason.NAMESPACE_TERMINATING),
        (500, "etcdserver: request timed out", Reason.API_ERROR),
    ],
)  # fmt: skip
def test_refusals_of_the_api_are_told_apart(status: int, message: str, reason: Reason) -> None:
    assert problem_of(KubeError(status, "Forbidden", message), "create Pod x").reason == reason


class _Events:
    def __init__(self) -> None:
        self.told: list[str] = []

    async def emit(self, cluster: ClusterObject, event: EmitEvent) -> bool:
        self.told.append(event.reason)
        return True


@pytest.mark.parametrize(("forbidden", "told"), [(True, ["Refused"]), (False, ["Launched", "Refused"])])
async def test_launched_is_told_only_of_what_was_launched(forbidden: bool, told: list[str]) -> None:
    kube, recorder = FakeKube(), _Events()
    if forbidden:
        kube.faults.forbidden.add(("create", "pods"))
    executor = KubeExecutor(kube, None, recorder, lambda: 0.0)  # type: ignore[arg-type]
    actor = Actor(executor, None, None, lambda uid: "", lambda: True, None)  # type: ignore[arg-type]
    actions = (
        CreatePod({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {}}),
        EmitEvent("Normal", "Launched", "launching 1 pod: a"),
        EmitEvent("Warning", "Refused", "x"),
    )
    outcomes = await actor.run(Observed(0.0, CLUSTER), actions)
    assert recorder.told == told
    held = await actor.run(Observed(0.0, CLUSTER), actions[1:])  # a create that is held back after a refusal
    assert recorder.told[len(told) :] == ["Refused"] and len(held) == 1
    assert len(outcomes) == 1 + len(told)
