"""The real decide() over the fake API server: whatever write the operator dies after, the end is the same."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_world import end_state, fresh, make_reconciler, pdcluster, state_of

from pdoperator.domain.decide import decide
from pdoperator.kube.fake import FakeKube
from pdoperator.kube.fake_faults import Crash
from pdoperator.kube.kinds import PDCLUSTER_API, kind_of
from pdoperator.kube.verbs import CLUSTER_RULES
from pdoperator.runtime.carried import ClusterState


async def converge(kube: FakeKube, state: ClusterState, rounds: int = 5) -> None:
    reconciler = make_reconciler(kube, decide)
    for _ in range(rounds):
        await reconciler.once(state)


async def clean_run() -> FakeKube:
    kube = fresh()
    await converge(kube, state_of(kube.put(pdcluster(replicas=2))))
    return kube


def without_events(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if not k.startswith("Event/")}


async def test_pods_of_both_roles_and_every_child_are_made() -> None:
    kube = await clean_run()
    roles = [p["metadata"]["labels"]["pdcluster.io/role"] for p in kube.of("Pod")]
    assert sorted(roles) == ["decode", "prefill", "prefill"]
    assert {o["kind"] for o in kube.objects.values()} >= {
        "Pod", "Secret", "Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "PDCluster",
    }  # fmt: skip
    assert {c["type"] for c in kube.of("PDCluster")[0]["status"]["conditions"]} >= {"Ready", "PrefillReady"}


async def test_a_restarted_operator_writes_nothing() -> None:
    kube = await clean_run()
    before = len(kube.writes)
    await converge(kube, state_of(kube.of("PDCluster")[0]))
    assert [(w.verb, w.resource, w.name) for w in kube.writes[before:]] == []


async def test_the_end_state_is_the_same_after_a_crash_at_every_write() -> None:
    clean = await clean_run()
    total = len(clean.writes)
    assert total >= 10
    wanted = without_events(end_state(clean))
    for k in range(1, total + 1):
        kube = fresh()
        obj = kube.put(pdcluster(replicas=2))
        kube.faults.crash_after = k
        with pytest.raises(Crash):
            await converge(kube, state_of(obj))
        kube.faults.crashed = False
        await converge(kube, state_of(obj))
        assert without_events(end_state(kube)) == wanted, f"after write {k} of {total}"


async def test_every_call_that_was_made_is_in_the_rbac_table() -> None:
    kube = await clean_run()
    await kube.delete(PDCLUSTER_API, "PDCluster", "user", "a")
    groups = {k.resource: k.group for k in (kind_of(key[0], key[1]) for key in kube_kinds())}
    granted = {(r.group, r.resource, verb) for r in CLUSTER_RULES for verb in r.verbs}
    made = {(groups[resource.partition("/")[0]], resource, verb) for verb, resource in kube.calls[:-1]}
    assert made <= granted


def kube_kinds() -> list[tuple[str, str]]:
    from pdoperator.kube.kinds import KINDS

    return list(KINDS)


@pytest.mark.parametrize(
    ("verb", "resource"), [("create", "pods"), ("patch", "services"), ("patch", "deployments"), ("patch", "secrets")]
)
async def test_a_missing_right_is_named_in_progressing(verb: str, resource: str) -> None:
    kube = fresh()
    kube.faults.forbidden.add((verb, resource))
    obj = kube.put(pdcluster())
    await converge(kube, state_of(obj), rounds=3)
    conditions = {c["type"]: c for c in kube.of("PDCluster")[0]["status"]["conditions"]}
    assert (conditions["Progressing"]["status"], conditions["Progressing"]["reason"]) == ("False", "APIForbidden")
    assert f'cannot {verb} resource "{resource}"' in conditions["Progressing"]["message"]
