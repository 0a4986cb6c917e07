"""One reconcile against the fake API server."""

from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from typing import Any

import pytest
from cryptography import x509
from runtime_world import NOW, end_state, make_reconciler, pdcluster, small_decide, state_of

from pdoperator.api import names
from pdoperator.domain.actions import Apply, Decision, DeletePod, EmitEvent, IssueCertificate, Memory, SetGate
from pdoperator.domain.observed import PodAnswer, RouterPodSeen
from pdoperator.kube.execute import NotLeading
from pdoperator.kube.fake import FakeKube
from pdoperator.kube.fake_faults import Crash
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.runtime.carried import ClusterState


async def converge(kube: FakeKube, state: ClusterState, rounds: int = 6) -> None:
    reconciler = make_reconciler(kube)
    for _ in range(rounds):
        await reconciler.once(state)


def cluster_of(kube: FakeKube) -> dict[str, Any]:
    return kube.of("PDCluster")[0]


async def test_pods_secret_and_status_are_made_once_and_a_restart_writes_nothing(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=2))
    await converge(kube, state_of(obj))
    assert [p["metadata"]["name"] for p in kube.of("Pod")] == ["a-prefill-0-0-abc-0", "a-prefill-1-0-abc-0"]
    owner = kube.of("Pod")[0]["metadata"]["ownerReferences"]
    assert [(o["kind"], o["uid"], o["controller"]) for o in owner] == [("PDCluster", obj["metadata"]["uid"], True)]
    secret = kube.of("Secret")[0]
    leaf = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
    status = cluster_of(kube)["status"]
    assert status["seen"] == 2
    assert status["certificates"]["notAfter"] == leaf.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ")
    before = len(kube.writes)
    await converge(kube, state_of(obj))  # a new process: empty memory, new clients
    assert kube.writes[before:] == []


@pytest.mark.parametrize("k", range(1, 6))
async def test_a_crash_after_any_write_ends_in_the_same_state(kube: FakeKube, k: int) -> None:
    clean = FakeKube(now=lambda: NOW)
    await converge(clean, state_of(clean.put(pdcluster(replicas=2))))
    assert len(clean.writes) == 5  # certificate, two pods, two statuses: every k below happens

    obj = kube.put(pdcluster(replicas=2))
    kube.faults.crash_after = k
    with pytest.raises(Crash):
        await converge(kube, state_of(obj))
    assert len(kube.writes) == k
    kube.faults.crashed = False
    await converge(kube, state_of(obj))
    assert end_state(kube) == end_state(clean)


async def test_a_pod_with_our_label_and_another_owner_is_not_ours(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))
    labels = {names.LABEL_CLUSTER_UID: obj["metadata"]["uid"], names.LABEL_ROLE: "prefill", names.LABEL_REPLICA: "7"}
    kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": "user", "labels": labels}})
    await converge(kube, state_of(obj))
    assert {p["metadata"]["name"] for p in kube.of("Pod")} == {"x", "a-prefill-0-0-abc-0"}
    assert cluster_of(kube)["status"]["seen"] == 1


async def test_a_taken_pod_name_is_reported_and_the_other_pods_are_made(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=2))
    kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a-prefill-0-0-abc-0", "namespace": "user"}})
    result = await make_reconciler(kube).once(state_of(obj))
    assert result.failed
    assert [p["metadata"]["name"] for p in kube.of("Pod")] == ["a-prefill-0-0-abc-0", "a-prefill-1-0-abc-0"]


async def test_children_of_somebody_else_are_never_written_over(kube: FakeKube) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a-router", "namespace": "user"}, "spec": {}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a-pdtransfer-tls", "namespace": "user"}}
    obj = kube.put(pdcluster(replicas=0))
    kube.put(theirs)
    kube.put({**secret, "data": {"tls.key": "dGhlaXJz"}})

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        mine = {**theirs, "spec": {"selector": {"mine": "1"}}}
        issue = IssueCertificate("a-pdtransfer-tls", names.pod_server_name(observed.cluster.uid))
        return Decision((Apply(mine), issue), None, memory, 5.0)

    state = state_of(obj)
    assert (await make_reconciler(kube, decide).once(state)).failed
    assert state.problem is not None and "belongs to something else; rename or delete it" in state.problem.message
    assert kube.of("Service")[0]["spec"] == {} and "ownerReferences" not in kube.of("Service")[0]["metadata"]
    assert kube.of("Secret")[0]["data"] == {"tls.key": "dGhlaXJz"}
    await kube.delete("v1", "Service", "user", "a-router")
    await kube.delete("v1", "Secret", "user", "a-pdtransfer-tls")
    assert not (await make_reconciler(kube, decide).once(state)).failed
    assert kube.of("Service")[0]["spec"] == {"selector": {"mine": "1"}}
    assert {"ca.crt", "tls.crt", "tls.key"} == set(kube.of("Secret")[0]["data"])


async def test_a_forbidden_create_reaches_status_with_what_to_grant(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))
    kube.faults.forbidden.add(("create", "pods"))
    state = state_of(obj)
    clock = itertools.count(NOW, 2.0)
    reconciler = make_reconciler(kube, now=lambda: next(clock))
    assert (await reconciler.once(state)).failed
    assert state.problem is not None and 'cannot create resource "pods"' in state.problem.message
    await reconciler.once(state)
    assert cluster_of(kube)["status"]["problem"] == "APIForbidden"
    kube.faults.forbidden.clear()
    for _ in range(3):
        await reconciler.once(state)
    assert cluster_of(kube)["status"]["problem"] == ""
    assert len(kube.of("Pod")) == 1


async def test_a_refused_write_backs_off_alone_and_everything_else_goes_on_at_the_usual_pace(kube: FakeKube) -> None:
    """A full quota must not make wiring and routing as slow as its own retries."""
    obj = kube.put(pdcluster(replicas=1))
    kube.faults.forbidden.add(("create", "pods"))
    clock = [NOW]
    deletes: list[float] = []

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        done = small_decide(observed, memory, settings)
        deletes.append(observed.now)
        return Decision((*done.actions, DeletePod("gone", "u", "r", "m")), done.status, done.memory, 0.5)

    reconciler, state = make_reconciler(kube, decide, now=lambda: clock[0]), state_of(obj)
    for _ in range(40):
        result = await reconciler.once(state)
        assert result.failed and not result.blind and result.requeue_after <= 2.0
        clock[0] += 0.5
    tried = [c for c in kube.calls if c == ("create", "pods")]
    # At 0, 0.5, then 1, 2, 4 and 8 s later: 1.5, 3.5, 7.5 and 15.5 s.
    assert len(tried) == 6
    assert len([c for c in kube.calls if c == ("delete", "pods")]) == 40
    assert cluster_of(kube)["status"]["problem"] == "APIForbidden"
    obj["spec"]["prefill"]["replicas"] = 2
    kube.put(obj)
    kube.faults.forbidden.clear()
    assert not (await reconciler.once(state)).failed  # a new spec waits for nothing
    assert len(kube.of("Pod")) == 2


async def test_without_the_right_to_list_pods_nothing_is_created_and_ready_is_unknown(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    kube.faults.forbidden.add(("list", "pods"))
    assert (await make_reconciler(kube).once(state_of(obj))).failed
    assert kube.of("Pod") == []
    conditions = {c["type"]: c for c in cluster_of(kube)["status"]["conditions"]}
    assert (conditions["Ready"]["status"], conditions["Ready"]["reason"]) == ("Unknown", "APIForbidden")
    assert conditions["Progressing"]["status"] == "False"
    writes = len(kube.writes)
    await make_reconciler(kube).once(state_of(obj))
    assert len(kube.writes) == writes  # told once, not again


async def test_a_server_error_changes_status_only_when_it_lasts(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    state, reconciler = state_of(obj), make_reconciler(kube)
    kube.faults.broken.add(("list", "pods"))
    for _ in range(2):
        await reconciler.once(state)
    assert "status" not in cluster_of(kube)
    await reconciler.once(state)
    assert cluster_of(kube)["status"]["conditions"][0]["reason"] == "APIError"


async def test_a_forbidden_status_is_told_by_an_event(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=0))
    kube.faults.forbidden.add(("patch", "pdclusters/status"))
    assert (await make_reconciler(kube).once(state_of(obj))).failed
    assert [e["reason"] for e in kube.of("Event")] == ["APIForbidden"]


async def test_deleting_the_pdcluster_takes_its_pods_and_the_task_ends(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())
    await converge(kube, state_of(obj))
    await kube.delete(PDCLUSTER_API, "PDCluster", "user", "a")
    assert kube.of("Pod") == [] and kube.of("Secret") == []
    assert (await make_reconciler(kube).once(state_of(obj))).gone


async def test_a_namesake_with_another_uid_is_not_touched(kube: FakeKube) -> None:
    kube.put(pdcluster())
    other = ClusterState("user", "a", "another-uid")
    assert (await make_reconciler(kube).once(other)).gone
    assert kube.writes == []


async def test_a_delete_meant_for_a_replaced_pod_spares_its_successor(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        return Decision((DeletePod("p", "old-uid", "r", "m"),), None, memory, 5.0)

    kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "user"}})
    result = await make_reconciler(kube, decide).once(state_of(obj))
    assert not result.failed
    assert len(kube.of("Pod")) == 1


async def test_a_gate_keeps_its_transition_time_while_its_status_stands(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))
    await converge(kube, state_of(obj))
    since = "2026-01-01T00:00:00Z"
    pod = kube.of("Pod")[0]
    gate = {"type": names.GATE_KV_WIRED, "status": "True", "lastTransitionTime": since, "message": "old"}
    kube.put({**pod, "status": {"conditions": [gate, {"type": "Ready", "status": "True"}]}})

    def decide_with(status: bool) -> Any:
        def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
            seen = observed.pods[0]
            return Decision((SetGate(seen.name, seen.uid, status, "R", "new"),), None, memory, 5.0)

        return decide

    def conditions() -> dict[str, Any]:
        return {c["type"]: c for c in kube.of("Pod")[0]["status"]["conditions"]}

    await make_reconciler(kube, decide_with(True)).once(state_of(obj))
    assert (conditions()[names.GATE_KV_WIRED]["message"], conditions()[names.GATE_KV_WIRED]["lastTransitionTime"]) == (
        "new",
        since,
    )
    await make_reconciler(kube, decide_with(False)).once(state_of(obj))
    assert conditions()[names.GATE_KV_WIRED]["lastTransitionTime"] == "2027-01-15T08:00:00Z"  # NOW
    assert conditions()["Ready"]["status"] == "True"  # the kubelet's conditions are left alone


async def test_an_operator_that_lost_its_lease_stops_between_two_actions(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=3))
    answers = iter([True, True, False, False, False])
    with pytest.raises(NotLeading):
        await make_reconciler(kube, may_act=lambda: next(answers)).once(state_of(obj))
    assert len(kube.of("Pod")) < 3


async def test_a_repeated_event_is_one_object_and_is_not_written_again_within_the_quiet_time(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=0))

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        return Decision((EmitEvent("Warning", "Refused", "A3 does not fit"),), None, memory, 5.0)

    reconciler = make_reconciler(kube, decide)
    for _ in range(50):
        await reconciler.once(state_of(obj))
    event = kube.of("Event")[0]
    assert len(kube.of("Event")) == 1
    assert (event["involvedObject"]["uid"], event["reason"]) == (obj["metadata"]["uid"], "Refused")
    assert len([w for w in kube.writes if w.resource == "events"]) == 1


async def test_an_action_that_was_dropped_by_the_network_is_done_at_the_next_look(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))
    kube.faults.drop.add(("create", "pods"))
    state, reconciler = state_of(obj), make_reconciler(kube)
    assert (await reconciler.once(state)).failed
    kube.faults.drop.clear()
    assert not (await reconciler.once(state)).failed
    assert len(kube.of("Pod")) == 1


async def test_the_wait_doubles_while_there_is_no_news_and_restarts_with_a_change(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        done = small_decide(observed, memory, settings)
        return Decision(done.actions, done.status, done.memory, 0.5)

    reconciler, state = make_reconciler(kube, decide), state_of(obj)
    waits = [(await reconciler.once(state)).requeue_after for _ in range(12)]
    assert waits[:3] == [0.5, 0.5, 0.5]
    assert sorted({w for w in waits if w > 0.5}) == [1.0, 2.0, 4.0, 5.0]
    obj["spec"]["prefill"]["replicas"] = 2
    kube.put(obj)
    assert (await reconciler.once(state)).requeue_after == 0.5


async def test_a_calm_pdcluster_is_peeked_at_without_the_api_server_and_any_new_word_is_news(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=1))
    reconciler, state = make_reconciler(kube), state_of(obj)
    results = [await reconciler.once(state) for _ in range(5)]
    assert [r.peeks for r in results[:2]] == [0, 0] and results[-1].peeks > 0
    before = len(kube.calls)
    assert not await reconciler.peek(state)
    assert len(kube.calls) == before
    assert state.seen is not None
    pod = state.seen.pods[0]
    state.seen = replace(state.seen, answers={pod.uid: PodAnswer(error="OperatorCannotReachPods")})
    assert await reconciler.peek(state)
    router = RouterPodSeen(pod, workers=(), error="")
    state.seen = replace(state.seen, answers={}, routers=(router,))
    assert await reconciler.peek(state)  # it lists nothing now: it does not even run


async def test_a_decision_that_breaks_is_told_in_status_and_touches_nothing(kube: FakeKube) -> None:
    obj = kube.put(pdcluster())

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        raise ZeroDivisionError

    state, reconciler = state_of(obj), make_reconciler(kube, decide)
    for _ in range(3):
        assert (await reconciler.once(state)).failed
    conditions = {c["type"]: c for c in cluster_of(kube)["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "Unknown" and "ZeroDivisionError" in conditions["Ready"]["message"]
    assert {w.resource for w in kube.writes} == {"pdclusters/status"}


async def test_a_status_is_not_written_over_a_newer_spec(kube: FakeKube) -> None:
    obj = kube.put(pdcluster(replicas=0))

    def decide(observed: Any, memory: Memory, settings: Any) -> Decision:
        kube.put({**obj, "spec": {**obj["spec"], "prefill": {"replicas": 9}}})  # edited in the meantime
        return small_decide(observed, memory, settings)

    result = await make_reconciler(kube, decide).once(state_of(obj))
    assert "status" not in cluster_of(kube)
    assert (result.failed, result.requeue_after) == (False, 0.1)
