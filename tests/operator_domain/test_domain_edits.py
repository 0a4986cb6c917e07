"""decide() and specs that change: what does not fit or can not be read stops nothing that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_makers import quickstart
from domain_world import World, ready_world

from pdoperator.domain.actions import (
    Delete,
    SetWorkers,
)
from pdoperator.domain.decide import decide
from pdtransfer.contract.base import Role


def test_what_does_not_fit_launches_nothing_and_a_fix_makes_it_run() -> None:
    bad = quickstart(transfer__backend="NIXL", decode__hostKV={"mode": "HostReceive"})
    w = World(bad)
    w.run()
    assert w.created == []
    assert w.condition("Compatible")["reason"] == "DoesNotFit"
    assert "F3" in w.condition("Ready")["message"]
    assert [e.reason for e in w.events] == ["Refused"]
    w.edit(quickstart(decode__hostKV={"mode": "HostReceive"}))
    w.run()
    assert w.condition("Ready")["status"] == "True"


def test_an_invalid_spec_is_named_and_stops_nothing_that_runs() -> None:
    w = ready_world()
    before = dict(w.gates())
    w.edit(quickstart(kvCache={"pageSise": 16}))
    w.run()
    assert w.condition("Compatible")["reason"] == "InvalidSpec"
    assert w.condition("Ready")["status"] == "False"
    assert w.gates() == before
    assert len(w.routed()) == 3
    # A rank that restarts meanwhile is wired again.
    decode = w.side(Role.DECODE)[0]
    w.restart_rank(decode)
    w.run()
    assert decode.gate == "True"


def test_an_unfit_edit_leaves_what_runs_alone() -> None:
    w = ready_world()
    pods = set(w.pods)
    w.edit(quickstart(prefill__tensorParallelSize=2, decode__extraArgs=["--page_size=32"]))
    w.run()
    assert set(w.pods) == pods
    assert len(w.routed()) == 3
    assert w.condition("Compatible")["status"] == "False"
    w.edit(quickstart())
    w.run()
    assert set(w.pods) == pods, "a revert returns to the pods that still run"
    assert w.condition("Ready")["status"] == "True"


@pytest.mark.parametrize(
    "edit",
    [
        quickstart(prefill__tensorParallelSize=2, decode__extraArgs=["--page_size=32"]),
        quickstart(kvCache={"pageSise": 16}),
    ],
    ids=["unfit", "unreadable"],
)
def test_what_runs_is_healed_from_its_own_spec_while_a_newer_one_does_not_fit(edit: dict[str, object]) -> None:
    w = ready_world()
    revision = w.side(Role.DECODE)[0].revision
    w.edit(edit)
    w.run()
    w.restart_operator()
    victim = w.side(Role.DECODE)[0]
    del w.pods[victim.uid]
    w.run(40)
    assert [p.revision for p in w.side(Role.DECODE)] == [revision] * 2
    assert len(w.routed()) == 3
    assert w.condition("DecodeReady")["status"] == "True"
    assert (w.condition("Compatible")["status"], w.condition("Ready")["status"]) == ("False", "False")
    assert w.condition("Progressing")["reason"] == "Blocked"
    assert w.status["observedGeneration"] == 2
    w.pods.clear()  # nothing of it runs any more: nothing is launched from a spec that was withdrawn
    w.run(10)
    assert w.pods == {}


def test_the_last_five_specs_that_fitted_are_kept_and_one_that_comes_back_is_the_newest() -> None:
    w = ready_world()
    for replicas in (1, 3, 4, 5, 6, 2):  # 2 is the quickstart's own
        w.edit(quickstart(decode__replicas=replicas))
        w.run()
    kept = sorted(w.stored.values(), key=lambda s: -s.number)
    assert [s.raw["decode"]["replicas"] for s in kept] == [2, 6, 5, 4, 3]
    assert [s.number for s in kept] == [7, 6, 5, 4, 3]


def test_an_unfit_change_of_the_backend_leaves_wired_pods_wired() -> None:
    w = ready_world()
    w.edit(quickstart(transfer__backend="NIXL", decode__hostKV={"mode": "HostReceive"}))
    w.run()
    assert w.condition("Compatible")["status"] == "False"
    assert len(w.routed()) == 3
    decode = w.side(Role.DECODE)[0]
    w.restart_rank(decode)
    w.run()
    assert decode.gate == "True"
    assert len(w.routed()) == 3


def test_policies_that_were_switched_off_and_a_router_that_is_not_asked_for_are_removed() -> None:
    w = ready_world()
    assert {"NetworkPolicy/quickstart-pods", "PodDisruptionBudget/quickstart-decode"} <= set(w.applied)
    w.settings = replace(w.settings, network_policy=False, disruption_budgets=False)
    w.edit(quickstart(router={"type": "None"}))
    d = decide(w.observe(), w.memory, w.settings)
    gone = {(a.api_version, a.kind, a.name) for a in d.actions if isinstance(a, Delete)}
    assert gone == {
        ("apps/v1", "Deployment", "quickstart-router"),
        ("networking.k8s.io/v1", "NetworkPolicy", "quickstart-pods"),
        ("policy/v1", "PodDisruptionBudget", "quickstart-decode"),
        ("policy/v1", "PodDisruptionBudget", "quickstart-prefill"),
        ("v1", "Service", "quickstart-router"),
    }


def test_scaling_down_unroutes_first_and_deletes_then() -> None:
    w = ready_world()
    last = w.side(Role.DECODE)[1]
    w.edit(quickstart(decode__replicas=1))
    d = w.step()
    assert last.uid in w.pods, "still there while a router lists it"
    assert [a.remove for a in d.actions if isinstance(a, SetWorkers)] == [(f"http://{last.ip}:30000",)]
    w.run()
    assert last.uid not in w.pods
    assert w.condition("Ready")["status"] == "True"


def test_a_new_revision_rolls_one_pod_at_a_time_and_prefill_stays() -> None:
    w = ready_world()
    prefill = w.side(Role.PREFILL)[0].uid
    old = {p.uid for p in w.side(Role.DECODE)}
    w.edit(quickstart(decode__env=[{"name": "OMP_NUM_THREADS", "value": "1"}]))
    for _ in range(40):
        d = w.step()
        serving = [p for p in w.side(Role.DECODE) if p.gate == "True"]
        assert serving, "one decode serves throughout"
        if not d.actions and d.status is None:
            break
    assert {p.uid for p in w.side(Role.PREFILL)} == {prefill}
    assert not old & set(w.pods)
    assert w.condition("Ready")["status"] == "True"


def test_surge_brings_the_successor_before_the_last_one_goes() -> None:
    raw = quickstart(decode__replicas=1, rollout={"maxSurge": 1, "maxUnavailable": 0})
    w = World(raw)
    w.run()
    raw2 = quickstart(
        decode__replicas=1,
        rollout={"maxSurge": 1, "maxUnavailable": 0},
        decode__env=[{"name": "A", "value": "1"}],
    )
    w.edit(raw2)
    for _ in range(40):
        d = w.step()
        assert any(x.worker_type == "decode" for x in w.workers.values()), "a decode is routed throughout"
        if not d.actions and d.status is None:
            break
    assert w.condition("Ready")["status"] == "True"
    assert len(w.side(Role.DECODE)) == 1


def test_a_leaving_pod_waits_for_a_router_that_does_not_answer_but_not_for_ever() -> None:
    w = ready_world()
    last = w.side(Role.DECODE)[1]
    w.edit(quickstart(decode__replicas=1))
    listed = dict(w.workers)
    for _ in range(5):
        observed = w.observe()
        silent = replace(observed, routers=tuple(replace(r, workers=None) for r in observed.routers))
        w.act(decide(silent, w.memory, w.settings))
        w.now += 1
    assert last.uid in w.pods
    assert w.workers == listed
    w.now += 31
    observed = w.observe()
    silent = replace(observed, routers=tuple(replace(r, workers=None) for r in observed.routers))
    w.act(decide(silent, w.memory, w.settings))
    assert last.uid not in w.pods


def test_a_new_model_rolls_both_roles_and_never_pairs_across() -> None:
    w = ready_world(decode__replicas=2, prefill__replicas=2)
    w.edit(quickstart(decode__replicas=2, prefill__replicas=2, model__servedName="other"))
    for _ in range(80):
        d = w.step()
        for pod in w.pods.values():
            if pod.roster is None:
                continue
            assert all(c.model.name == pod.model for cards in pod.roster.peers.values() for c in cards)
        if not d.actions and d.status is None:
            break
    assert {p.model for p in w.pods.values()} == {"other"}
    assert w.condition("Ready")["status"] == "True"
    assert len(w.status["islands"]) == 1
