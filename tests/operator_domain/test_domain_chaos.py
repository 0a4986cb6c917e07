"""Random faults against decide(): at every moment routed pods are wired to each other, gates fall only
with a cause, and when the faults stop everything is Ready again."""

from __future__ import annotations

import pytest
from domain_makers import quickstart
from domain_world import World
from fake_pod import FakePod
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState


class Chaos(RuleBasedStateMachine):
    """Faults between reconciles."""

    @initialize(prefills=st.sampled_from((2, 1)), decodes=st.sampled_from((2, 3, 1)))
    def start(self, prefills: int, decodes: int) -> None:
        self.w = World(quickstart(prefill__replicas=prefills, decode__replicas=decodes))
        self.w.run()
        self.before: dict[str, str] = {}
        self.causes: set[str] = set()
        self.quiet = True

    def _pick(self, n: int) -> FakePod | None:
        pods = sorted(self.w.pods.values(), key=lambda p: p.uid)
        return pods[n % len(pods)] if pods else None

    def _cause(self, pod: FakePod) -> None:
        """A fault of one pod may cost others of its island their place (the set must stay two-sided)."""
        self.causes.add(pod.uid)
        self.quiet = False

    @rule(n=st.integers(0, 9))
    def rank_restarts(self, n: int) -> None:
        pod = self._pick(n)
        if pod:
            self.w.restart_rank(pod)
            self._cause(pod)

    @rule(n=st.integers(0, 9))
    def pod_is_deleted(self, n: int) -> None:
        pod = self._pick(n)
        if pod:
            del self.w.pods[pod.uid]
            self._cause(pod)

    @rule(n=st.integers(0, 9))
    def pod_fails(self, n: int) -> None:
        pod = self._pick(n)
        if pod:
            pod.phase, pod.engine, pod.exit_code, pod.restarts = "Failed", "crashed", 137, 1
            self._cause(pod)

    @rule(n=st.integers(0, 9))
    def operator_loses_a_pod(self, n: int) -> None:
        pod = self._pick(n)
        if pod:
            pod.reachable = not pod.reachable

    @rule(n=st.integers(0, 9), m=st.integers(0, 9))
    def link_is_cut(self, n: int, m: int) -> None:
        p = self.w.side(Role.PREFILL)
        d = self.w.side(Role.DECODE)
        if p and d:
            pair = frozenset((p[n % len(p)].uid, d[m % len(d)].uid))
            self.w.cut |= {pair}
            self.causes |= pair
            self.quiet = False

    @rule()
    def operator_restarts(self) -> None:
        self.w.restart_operator()

    @rule()
    def router_restarts(self) -> None:
        self.w.workers.clear()

    @rule(decodes=st.integers(1, 3))
    def scale(self, decodes: int) -> None:
        raw = quickstart(prefill__replicas=self.w.spec.prefill.replicas, decode__replicas=decodes)
        self.w.edit(raw)
        self.quiet = False
        self.causes.add("scale")

    @rule(steps=st.integers(1, 4))
    def reconcile(self, steps: int) -> None:
        for _ in range(steps):
            gates = {p.uid: p.gate for p in self.w.pods.values()}
            self.w.step()
            if self.quiet:
                fell = [u for u, g in gates.items() if g == "True" and self.w.pods[u].gate != "True"]
                assert not fell, f"{fell} fell without a cause"
        self._check_routed()

    def _check_routed(self) -> None:
        """Right after a reconcile: routers list exactly the gated pods the operator knows."""
        by_url = {f"http://{p.ip}:30000": p for p in self.w.pods.values()}
        for url in self.w.routed():
            assert url in by_url, "a pod that is gone is listed"

    @invariant()
    @precondition(lambda self: hasattr(self, "w"))
    def verdicts_exist_for_gated_pairs(self) -> None:
        """Only where all is reachable and nothing happened since the last look."""
        if not self.quiet or any(not p.reachable for p in self.w.pods.values()):
            return
        for p in self.w.side(Role.PREFILL):
            for d in self.w.side(Role.DECODE):
                if p.gate == d.gate == "True":
                    states = {v.state for v in self.w.verdicts(p) if v.peer_pod_uid == d.uid}
                    assert states == {VerdictState.WIRED}

    @rule()
    def after_some_seconds_no_dead_pair_is_ready(self) -> None:
        for _ in range(8):
            self.w.step()
        for p in self.w.side(Role.PREFILL):
            for d in self.w.side(Role.DECODE):
                if p.reachable and d.reachable and p.gate == d.gate == "True":
                    states = {v.state for v in self.w.verdicts(p) if v.peer_pod_uid == d.uid}
                    assert states == {VerdictState.WIRED}

    @rule()
    def faults_stop_and_all_is_ready_again(self) -> None:
        self.w.cut.clear()
        for p in self.w.pods.values():
            p.reachable = True
        self.w.now += 400.0  # backoffs and stability windows are over
        for _ in range(60):
            self.w.step()
            if self.w.condition("Ready")["status"] == "True":
                break
        ready = self.w.condition("Ready")
        assert ready["status"] == "True", ready
        self.w.run(60)
        assert {p.gate for p in self.w.pods.values()} == {"True"}
        assert self.w.routed() == {f"http://{p.ip}:30000" for p in self.w.pods.values()}
        assert not set(self.w.refused) & {"LowerKey", "SameKeyOtherContent"}
        self.quiet = True
        self.causes.clear()


Chaos.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestChaos = Chaos.TestCase


def cut_link_is_told() -> None:
    """Two of each: a cut between one prefill and one decode must cost one of them its place, although
    each still has a partner and its own probes pass."""
    w = World(quickstart(prefill__replicas=2))
    w.run()
    p, d = w.side(Role.PREFILL)[0], w.side(Role.DECODE)[1]
    w.cut.add(frozenset((p.uid, d.uid)))
    for _ in range(8):
        w.step()
    assert not p.gate == d.gate == "True"
    assert w.condition("Ready")["status"] == "False"


def test_a_cut_link_does_not_stay_among_the_ready_ones() -> None:
    cut_link_is_told()


def test_the_check_finds_gates_that_are_held_against_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: findings of Unreachable are ignored."""
    monkeypatch.setattr("pdoperator.domain.gates.against", lambda *_: False)
    with pytest.raises(AssertionError):
        cut_link_is_told()


def test_the_chaos_check_finds_a_set_that_is_not_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every pod counts as wired."""
    monkeypatch.setattr("pdoperator.domain.gates.best_set", lambda ps, ds, good: frozenset(ps) | frozenset(ds))
    machine = Chaos()
    machine.start(prefills=2, decodes=2)
    machine.after_some_seconds_no_dead_pair_is_ready()
    machine.link_is_cut(n=0, m=1)
    with pytest.raises(AssertionError):
        machine.after_some_seconds_no_dead_pair_is_ready()
