"""decide() believes evidence only: who can not be asked, what can not be read, and what peers found out about a pod."""

from __future__ import annotations

from dataclasses import replace

from domain_makers import quickstart
from domain_world import World, ready_world
from fake_pod import FakePod

from pdoperator.domain.actions import (
    CreatePod,
    DeletePod,
    Memory,
    PutRoster,
    SetGate,
    SetWorkers,
)
from pdoperator.domain.decide import decide
from pdoperator.domain.observed import PodAnswer, PodSeen
from pdtransfer.contract.base import MemoryKind, Role


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
