"""decide() against a world that obeys it: from nothing to Ready, and back to Ready after each fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domain_world import FakePod, World, quickstart

from pdoperator.domain.actions import (
    CreatePod,
    Delete,
    DeletePod,
    IssueCertificate,
    Memory,
    PutRoster,
    SetGate,
    SetWorkers,
)
from pdoperator.domain.decide import decide
from pdoperator.domain.observed import PodAnswer, PodSeen
from pdtransfer.contract.base import MemoryKind, Role


def ready_world(**changes: object) -> World:
    w = World(quickstart(**changes))
    w.run()
    assert w.condition("Ready")["status"] == "True", w.condition("Ready")
    return w


def test_quickstart_becomes_ready_wired_verified_and_routed() -> None:
    w = ready_world()
    assert len(w.pods) == 3
    assert set(w.gates().values()) == {"True"}
    assert len(w.routed()) == 3
    assert {c["type"]: c["status"] for c in w.status["conditions"]} == {
        "Ready": "True", "Compatible": "True", "FabricReady": "True", "PrefillReady": "True",
        "DecodeReady": "True", "PeersWired": "True", "KVTransferVerified": "True", "RouterReady": "True",
        "Progressing": "True",
    }  # fmt: skip
    # 4096 bytes in 10 microseconds are 410 MB/s on the slowest rank pair.
    assert w.status["summary"] == {
        "prefill": "1/1", "decode": "2/2", "wired": "2/2", "verified": "410 MB/s TCP",
    }  # fmt: skip
    assert w.status["effective"]["prefillTensorParallel"] == 2
    assert [e.reason for e in w.events] == ["Launched", "Wired"]


def test_a_restarted_operator_changes_nothing() -> None:
    w = ready_world()
    before = w.status
    w.restart_operator()
    d = w.step()
    assert d.actions == ()
    assert d.status is None
    assert w.status == before


def test_a_deleted_pod_is_made_again_wired_and_routed_and_the_dead_one_leaves_the_router() -> None:
    w = ready_world()
    victim = w.side(Role.DECODE)[0]
    del w.pods[victim.uid]
    w.step()
    assert f"http://{victim.ip}:30000" not in w.routed()
    w.run()
    assert w.condition("Ready")["status"] == "True"
    assert len(w.routed()) == 3
    # The survivors dropped it from their rosters.
    assert all(c.pod_uid != victim.uid for p in w.pods.values() for cards in p.roster.peers.values() for c in cards)


def test_a_restarted_rank_is_a_new_peer() -> None:
    w = ready_world()
    decode = w.side(Role.DECODE)[1]
    w.restart_rank(decode)
    w.step()
    assert decode.gate == "False"
    assert f"http://{decode.ip}:30000" not in w.routed()
    assert [p.gate for p in w.pods.values() if p is not decode] == ["True", "True"]
    w.run()
    assert decode.gate == "True"
    assert w.condition("Ready")["status"] == "True"
    assert "PeerReplaced" in [e.reason for e in w.events]


def test_pods_the_operator_can_not_reach_keep_their_gates_their_routes_and_their_place_in_rosters() -> None:
    w = ready_world()
    for p in w.pods.values():
        p.reachable = False
    d = w.step()
    assert not [a for a in d.actions if isinstance(a, SetGate | SetWorkers | DeletePod | CreatePod | PutRoster)]
    assert w.condition("PeersWired")["status"] == "Unknown"
    assert w.condition("PeersWired")["reason"] == "OperatorCannotReachPods"
    # Also after a restart of the operator, which then knows nobody's cards.
    w.restart_operator()
    d = w.step()
    assert not [a for a in d.actions if isinstance(a, SetGate | SetWorkers | DeletePod | CreatePod | PutRoster)]
    for p in w.pods.values():
        p.reachable = True
    w.run()
    assert w.condition("PeersWired")["status"] == "True"


def test_one_unreachable_pod_is_not_taken_out_of_its_peers_rosters() -> None:
    w = ready_world()
    w.restart_operator()
    lost = w.side(Role.DECODE)[0]
    lost.reachable = False
    d = w.step()
    assert not [a for a in d.actions if isinstance(a, PutRoster | SetGate | SetWorkers)]
    assert "http://" + lost.ip + ":30000" in w.routed()


class NewAgent(World):
    """A decode pod whose ranks took a new NIXL agent: same incarnation, other agent name and metadata."""

    rotated: str = ""

    def answer(self, pod: FakePod) -> PodAnswer:
        told = super().answer(pod)
        if pod.uid != self.rotated or told.cards is None:
            return told
        cards = tuple(
            c.model_copy(
                update={"generation": 1, "agent_name": f"{c.agent_name}.1", "nixl_metadata": "bWV0YWRhdGE="}
            ).sealed()
            for c in told.cards.cards
        )
        return replace(told, cards=told.cards.model_copy(update={"cards": cards}))


def test_a_new_agent_of_a_running_rank_reaches_its_peers_rosters_and_unwires_nothing() -> None:
    w = NewAgent(quickstart())
    w.run()
    decode, prefill = w.side(Role.DECODE)[0], w.side(Role.PREFILL)[0]
    w.rotated = decode.uid
    actions = [a for _ in range(5) for a in w.step().actions]
    assert not [a for a in actions if isinstance(a, SetGate | SetWorkers | DeletePod | CreatePod)]
    assert [a.roster.pod_uid for a in actions if isinstance(a, PutRoster)] == [prefill.uid]
    held = [c for cards in prefill.roster.peers.values() for c in cards if c.pod_uid == decode.uid]
    assert {c.generation for c in held} == {1} and not any(c.seal_broken for c in held)
    assert w.condition("Ready")["status"] == "True"


class LostNode(World):
    """A node that is gone: its kubelet tells nothing new, so the pod's conditions stay as they were."""

    def lose(self, pod: FakePod) -> None:
        self.frozen = {pod.uid: super().seen(pod)}
        pod.reachable = False
        self.cut |= {frozenset((pod.uid, other)) for other in self.pods}

    def seen(self, pod: FakePod) -> PodSeen:
        return getattr(self, "frozen", {}).get(pod.uid) or super().seen(pod)


def test_a_pod_on_a_lost_node_falls_out_by_its_peers_verdicts_though_nobody_can_ask_it() -> None:
    w = LostNode(quickstart())
    w.run()
    lost = w.side(Role.DECODE)[0]
    w.lose(lost)
    w.step()
    assert lost.gate == "True"  # one finding is not enough
    for _ in range(3):
        w.step()
    assert lost.gate == "False"
    assert w.routed() == {f"http://{p.ip}:30000" for p in w.pods.values() if p is not lost}
    assert {p.gate for p in w.pods.values() if p is not lost} == {"True"}
    # Also by an operator that has just started and knows no cards of it.
    w = LostNode(quickstart())
    w.run()
    lost = w.side(Role.DECODE)[0]
    w.restart_operator()
    w.lose(lost)
    for _ in range(4):
        w.step()
    assert lost.gate == "False"


class OtherVersion(World):
    """An operator that seals cards in another way than the pods (it was upgraded, they were not)."""

    broken: frozenset[str] = frozenset()

    def answer(self, pod: FakePod) -> PodAnswer:
        told = super().answer(pod)
        if pod.uid not in self.broken or told.cards is None:
            return told
        cards = tuple(c.model_copy(update={"fingerprint": "of another version"}) for c in told.cards.cards)
        return replace(told, cards=told.cards.model_copy(update={"cards": cards}))


def test_cards_that_an_upgraded_operator_can_not_read_unwire_nothing_and_new_pods_are_not_wired_by_them() -> None:
    w = OtherVersion(quickstart())
    w.run()
    w.restart_operator()
    w.broken = frozenset(w.pods)
    for _ in range(30):
        d = w.step()
        assert not [a for a in d.actions if isinstance(a, SetGate | SetWorkers | DeletePod | CreatePod | PutRoster)]
    wired = w.condition("PeersWired")
    assert (wired["status"], wired["reason"]) == ("Unknown", "InvalidCard")
    assert len(w.routed()) == 3
    # Evidence still counts: a rank that restarts leaves its sidecar unready.
    w.restart_rank(w.side(Role.DECODE)[0])
    w.step()
    assert w.side(Role.DECODE)[0].gate == "False"

    w = OtherVersion(quickstart())
    w.step()
    w.broken = frozenset(w.pods)
    w.run(20)
    assert {p.gate for p in w.pods.values()} == {""} and w.routed() == set()


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


def sit_out_the_backoff(w: World) -> None:
    """The failed pod's successor comes after its 10 s, not before."""
    created = len(w.created)
    for _ in range(8):
        w.step()
        assert len(w.created) == created, "not before its time"
    w.step(seconds=3.0)
    w.run()
    assert len(w.created) == created + 1


def test_a_failed_pod_is_replaced_after_a_backoff_that_outlives_the_operator() -> None:
    w = ready_world()
    victim = w.side(Role.DECODE)[0]
    victim.phase, victim.exit_code, victim.restarts, victim.engine = "Failed", 137, 1, "crashed"
    w.step()
    assert victim.uid not in w.pods
    assert w.status["backoff"][0]["failures"] == 1
    assert "137" in w.status["backoff"][0]["lastExit"]
    w.restart_operator()
    sit_out_the_backoff(w)
    assert w.condition("Ready")["status"] == "True"
    assert w.created[-1] != victim.name


def test_a_backoff_outlives_a_status_that_could_not_be_written() -> None:
    w = ready_world()
    told = w.status
    victim = w.side(Role.DECODE)[0]
    victim.phase, victim.exit_code, victim.restarts, victim.engine = "Failed", 137, 1, "crashed"
    w.step()
    w.status = told  # 409: the object had changed
    sit_out_the_backoff(w)


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


def test_a_certificate_secret_that_is_gone_is_written_again_when_a_pod_waits_for_it() -> None:
    w = ready_world()
    w.now += 200.0  # long after the last one was written
    waiting = w.observe().pods[0]
    text = 'MountVolume.SetUp failed for volume "pdtransfer-tls" : secret "quickstart-pdtransfer-tls" not found'
    stuck = replace(waiting, phase="Pending", warnings=(("FailedMount", text),))
    seen = replace(w.observe(), pods=(stuck, *w.observe().pods[1:]))
    first = decide(seen, w.memory, w.settings)
    assert [a.secret_name for a in first.actions if isinstance(a, IssueCertificate)] == ["quickstart-pdtransfer-tls"]
    again = decide(replace(seen, now=seen.now + 1.0), first.memory, w.settings)
    assert not [a for a in again.actions if isinstance(a, IssueCertificate)]  # the kubelet needs its time


def test_a_stale_registration_is_named_then_recycled() -> None:
    w = World(quickstart())
    w.step()
    bad = w.side(Role.DECODE)[0]
    bad.memory = None
    for _ in range(5):
        w.step()
    assert w.condition("PeersWired")["reason"] == "StaleRegistration"
    assert bad.roster is None
    w.step(seconds=61.0)
    w.step()
    assert bad.uid not in w.pods
    assert "Recycled" in [e.reason for e in w.events]
    w.step(seconds=11.0)
    w.run(40)
    assert w.condition("Ready")["status"] == "True"


def test_a_cut_link_takes_out_the_cheaper_pod_and_it_rejoins_after_a_while() -> None:
    w = ready_world()
    p, d = w.side(Role.PREFILL)[0], w.side(Role.DECODE)[1]
    w.cut.add(frozenset((p.uid, d.uid)))
    for _ in range(4):
        w.step()
    assert (p.gate, d.gate) == ("True", "False")
    assert w.condition("PeersWired")["status"] == "False"
    w.cut.clear()
    w.run(40)
    assert d.gate == "True"
    assert w.condition("Ready")["status"] == "True"


def test_pods_of_two_models_are_never_wired_to_each_other() -> None:
    w = World(quickstart())
    w.step()
    for p in w.side(Role.DECODE):
        p.model = "another"
    for _ in range(5):
        w.step()
    assert w.condition("Compatible")["status"] == "False"
    assert all(p.roster is None for p in w.pods.values())
    assert not w.routed()


def test_page_size_that_an_engine_changed_is_refused_from_the_cards() -> None:
    w = World(quickstart())
    w.step()
    for p in w.side(Role.DECODE):
        p.page = 32
    for _ in range(5):
        w.step()
    c = w.condition("Compatible")
    assert (c["status"], c["reason"]) == ("False", "DoesNotFit")
    assert "B1" in c["message"]
    assert not w.routed()


def test_a_cut_off_operator_writes_nothing_over_its_successor() -> None:
    w = ready_world()
    old = w.term
    w.restart_operator()
    w.restart_rank(w.side(Role.DECODE)[0])
    w.run()
    # The first operator comes back with its old term; it sees another world and must not act on it.
    w.restart_rank(w.side(Role.DECODE)[1])
    d = decide(w.observe(term=old), Memory(), w.settings)
    assert not [a for a in d.actions if isinstance(a, PutRoster)]


def test_memory_kind_is_told_in_status() -> None:
    w = World(quickstart())
    w.step()
    for p in w.side(Role.DECODE):
        p.memory = MemoryKind.DRAM
    w.run()
    assert w.status["effective"]["decodeMemory"] == "DRAM"


def test_an_api_refusal_is_named() -> None:
    w = ready_world()
    w.api_error, w.api_error_reason = "403 Forbidden: pods is forbidden", "APIForbidden"
    w.step()
    assert w.condition("Progressing")["reason"] == "APIForbidden"
    assert w.condition("Ready")["reason"] == "APIForbidden"


def test_sglangs_own_backend_is_launched_and_routed_and_says_that_nobody_wires_it() -> None:
    w = World(
        quickstart(transfer__backend="NIXL", engine={"type": "SGLang", "image": "sg:1"}, prefill__tensorParallelSize=1)
    )
    w.run()
    assert len(w.routed()) == 3
    assert len({x.pairing_protocol for x in w.workers.values()}) == 1
    assert w.condition("PeersWired")["reason"] == "NotManaged"
    assert w.condition("KVTransferVerified")["reason"] == "Verified"
    assert w.condition("Ready")["status"] == "True", w.condition("Ready")
    assert set(w.gates().values()) == {""}
    routed = w.routed()
    w.edit({"nonsense": 1})
    w.run()
    assert w.routed() == routed


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


def test_a_sidecar_that_restarts_does_not_unwire_its_peers() -> None:
    w = ready_world()
    decode = w.side(Role.DECODE)[0]
    rosters = {p.uid: p.roster for p in w.side(Role.PREFILL)}
    # The sidecar lost its memory; for one look no rank has registered again.
    decode.engine, decode.roster, decode.key = "gone", None, (0, 0)
    w.step()
    assert {p.uid: p.roster for p in w.side(Role.PREFILL)} == rosters
    decode.engine = "up"
    w.run()
    assert {p.uid: p.roster for p in w.side(Role.PREFILL)} == rosters, "the same incarnation is the same peer"
    assert decode.gate == "True"


def test_a_pod_that_vanished_does_not_lend_its_name() -> None:
    w = ready_world()
    victim = w.side(Role.PREFILL)[0]
    del w.pods[victim.uid]
    w.run()
    assert w.created[-1] == victim.name.rsplit("-", 1)[0] + "-1"


def test_memory_that_is_lost_in_the_middle_of_anything_changes_no_end() -> None:
    ends = []
    for lose_at in range(8):
        w = World(quickstart())
        for i in range(12):
            if i == lose_at:
                w.restart_operator()
            w.step()
        ends.append((w.condition("Ready")["status"], len(w.pods), sorted(w.routed()), w.status["summary"]))
    assert all(e == ends[0] for e in ends)
    assert ends[0][0] == "True"
