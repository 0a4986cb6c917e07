"""A prefill pod is replaced on evidence about itself alone (backends NIXL, Mooncake): the rule on hand-made results,
then whole PDClusters in the simulation, with faults that must replace nobody."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from domain_makers import quickstart
from domain_world import World

from pdoperator.domain import realrecycle
from pdoperator.domain.actions import Decision, DeletePod, ProbeEnd, SetWorkers, StartProbe
from pdoperator.domain.preflight import preflight
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult, Unit, forget, remember
from pdoperator.domain.realrecycle import failing_prefill
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Role

SETTINGS = DecideSettings()
FAILED, SERVED, BUSY = ProbeOutcome.TIMED_OUT, ProbeOutcome.SERVED, ProbeOutcome.BUSY
Row = tuple[float, str, str, ProbeOutcome]
"""Second, prefill (`p1/2`: attention-DP rank 2), decode, outcome."""
ROW: list[Row] = [(t, "p0", "d0", FAILED) for t in (100, 110, 130, 170)]
"""Four failures in a row over 70 s: just enough."""
OTHER: Row = (140, "p1", "d0", SERVED)


def end(name: str, restarts: int = 0) -> ProbeEnd:
    return ProbeEnd(name, f"uid-{name}", "10.0.0.1", restarts)


def replaced(
    rows: list[Row], *, prefill: int = 2, decode: int = 1, dp: int = 1, last: float = 0.0, restarts: int = 0
) -> dict[str, str]:
    """What the rule says at second 200 of `prefill` pods with `dp` ranks each; p0 restarted so often since."""
    units = [Unit(end(f"p{i}", restarts if i == 0 else 0), r, dp, "r") for i in range(prefill) for r in range(dp)]
    decodes = {"r": tuple(end(f"d{i}") for i in range(decode))}
    results = []
    for at, who, whom, outcome in sorted(rows):
        name, _, rank = who.partition("/")
        results.append(ProbeResult(StartProbe(end(name), end(whom), int(rank or 0), dp), outcome, "no answer", 1.0, at))
    history = forget(remember({}, results), units, decodes)
    return failing_prefill(units, decodes, history, last, 200.0, SETTINGS)


def test_a_prefill_that_fails_with_a_decode_that_another_serves_meanwhile_is_replaced() -> None:
    found = replaced([*ROW, OTHER])
    assert list(found) == ["uid-p0"]
    assert found["uid-p0"].startswith("4 real requests in a row failed over 70 s")
    assert "d0 got KV from another prefill" in found["uid-p0"] and "no answer" in found["uid-p0"]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ROW[1:], id="three failures"),
        pytest.param([(t, "p0", "d0", FAILED) for t in (111, 112, 130, 170)], id="over 59 s"),
        pytest.param([*ROW, (135, "p0", "d0", SERVED)], id="it served in between"),
        pytest.param([*ROW[:3], (170, "p0", "d0", BUSY), (175, "p0", "d0", BUSY)], id="busy is no failure"),
    ],
)
def test_too_few_failures_or_too_soon_replace_nobody(rows: list[Row]) -> None:
    assert replaced([*rows, OTHER]) == {}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="nobody else tried"),
        pytest.param([(99, "p1", "d0", SERVED)], id="served before the failures began only"),
        pytest.param([(140, "p1", "d0", FAILED)], id="the decode fails with both"),
        pytest.param([OTHER, (150, "p1", "d0", FAILED)], id="the other fails by now too"),
        pytest.param([(140, "p1", "d1", SERVED)], id="another decode is served"),
    ],
)
def test_where_decode_or_the_network_may_be_at_fault_nobody_is_replaced(rows: list[Row]) -> None:
    assert replaced([*ROW, *rows], decode=2) == {}


def test_where_others_serve_several_decodes_it_must_fail_with_two_of_them() -> None:
    served: list[Row] = [OTHER, (141, "p1", "d1", SERVED)]
    assert replaced([*ROW, *served], decode=2) == {}  # it may be the path between these two alone
    assert replaced([*ROW, *served, (180, "p0", "d1", FAILED)], decode=2)
    assert replaced([*ROW, *served, (180, "p0", "d1", FAILED)], decode=3)


def test_the_last_pod_that_serves_is_never_replaced() -> None:
    same_pod: Row = (140, "p0/1", "d0", SERVED)
    assert replaced([*ROW, same_pod], prefill=1, dp=2) == {}
    lame: list[Row] = [(140, "p1", "d0", SERVED), (141, "p1/1", "d0", FAILED)]
    assert replaced([*ROW, same_pod, *lame], dp=2) == {}  # the other pod has a failing rank itself
    assert replaced([*ROW, same_pod, (140, "p1", "d0", SERVED), (141, "p1/1", "d0", SERVED)], dp=2)


def test_one_failing_rank_is_enough_to_replace_its_pod() -> None:
    rows: list[Row] = [(t, "p0/3", d, o) for t, _, d, o in ROW]
    rows += [(120, f"{p}/{r}", "d0", SERVED) for p in ("p0", "p1") for r in range(4) if (p, r) != ("p0", 3)]
    (why,) = replaced(rows, dp=4).values()
    assert why.startswith("data-parallel rank 3: 4 real requests")


def test_one_at_a_time_the_longest_failing_first_and_not_soon_after_another() -> None:
    rows: list[Row] = [*ROW, *((t - 5, "p2", d, o) for t, _, d, o in ROW), OTHER]
    assert list(replaced(rows, prefill=3)) == ["uid-p2"]
    assert replaced(rows, prefill=3, last=141.0) == {}
    assert list(replaced(rows, prefill=3, last=140.0)) == ["uid-p2"]


def test_what_was_held_against_an_incarnation_is_not_held_against_the_next() -> None:
    assert replaced([*ROW, OTHER], restarts=1) == {}


# --- whole PDClusters ---------------------------------------------------------------------------


class Served(World):
    """Engines of a backend that reports nothing: `broken` says which requests are not answered."""

    def __init__(self, broken: Callable[[StartProbe], bool], **changes: Any) -> None:
        super().__init__(
            quickstart(**{"transfer__backend": "NIXL", "prefill__replicas": 2, "decode__replicas": 2, **changes})
        )
        self.broken = lambda probe: False
        self.run_for(30)
        assert self.condition("KVTransferVerified")["status"] == "True"
        self.broken = broken
        self.deleted: list[tuple[float, DeletePod]] = []
        self.unserved = 0

    def answered(self, probe: StartProbe) -> ProbeResult:
        if self.broken(probe):
            self.unserved += 1
            return ProbeResult(probe, FAILED, "no answer within 30 s", 1.0, self.now)
        return super().answered(probe)

    def step(self, seconds: float = 1.0) -> Decision:
        decision = super().step(seconds)
        for at, action in enumerate(decision.actions):
            if isinstance(action, DeletePod):
                self.deleted.append((self.now, action))
                # Off the routers first, and somebody else there goes on.
                gone = [a for a in decision.actions[:at] if isinstance(a, SetWorkers) and a.remove]
                assert gone, decision.actions
        return decision

    def run_for(self, seconds: int) -> None:
        for _ in range(0, seconds, 3):
            self.step(3.0)
            if self.now > 1_700_000_030:
                prefill = {w.url for w in self.workers.values() if w.worker_type == "prefill"}
                assert prefill, "no prefill is left on the router"


def first_prefill(world: World) -> str:
    return world.side(Role.PREFILL)[0].uid


@pytest.mark.parametrize("backend", ["NIXL", "Mooncake"])
def test_a_prefill_whose_requests_fail_is_replaced_and_serving_goes_on(backend: str) -> None:
    world = Served(lambda p: p.prefill.uid == lame, transfer__backend=backend)
    lame = first_prefill(world)
    name = world.pods[lame].name
    world.run_for(300)
    (deleted,) = [d for _, d in world.deleted]
    assert (deleted.uid, deleted.reason) == (lame, "Recycled")
    (event,) = [e for e in world.events if e.reason == "Recycled"]
    assert event.type == "Warning" and event.message.startswith(f"{name}: ")
    assert "real requests in a row failed over" in event.message and "got KV from another prefill" in event.message
    assert lame not in world.pods and len(world.side(Role.PREFILL)) == 2
    assert world.condition("KVTransferVerified")["status"] == world.condition("Ready")["status"] == "True"
    assert event.message == f"{name}: {world.status['backoff'][0]['lastExit']}"


def test_before_it_is_replaced_the_condition_says_that_it_will_be() -> None:
    world = Served(lambda p: p.prefill.uid == lame)
    lame = first_prefill(world)
    told = set()
    while not world.deleted:
        world.step()
        told.add(world.condition("KVTransferVerified")["message"])
    assert any("the operator replaces the pod after 4 over 60 s" in text for text in told)
    assert not any("delete pod" in text for text in told)


def faults(world: World) -> dict[str, Callable[[StartProbe], bool]]:
    """Requests that fail, by a fault that is not one prefill's."""
    prefill, decode = first_prefill(world), world.side(Role.DECODE)[0].uid
    return {
        "a decode gets KV from nobody": lambda p: p.decode.uid == decode,
        "no request gets through": lambda p: True,
        "one path is broken": lambda p: (p.prefill.uid, p.decode.uid) == (prefill, decode),
        "each third request fails": lambda p: len(world.probed) % 3 == 0,
    }


FAULTS = ("a decode gets KV from nobody", "no request gets through", "one path is broken", "each third request fails")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_decode_or_of_the_network_replaces_nobody(fault: str) -> None:
    world = Served(lambda p: False)
    world.broken = faults(world)[fault]
    world.run_for(900)
    assert world.deleted == [] and world.unserved > 3


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_a_rule_that_only_counts_failures_would_be_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test before."""
    monkeypatch.setattr(realrecycle, "_evidence", lambda *_: "it failed")
    monkeypatch.setattr(Served, "run_for", lambda self, seconds: [self.step(3.0) for _ in range(0, seconds, 3)])
    world = Served(lambda p: False, decode__replicas=1)
    world.broken = faults(world)[fault]
    world.run_for(900)
    assert world.deleted


def test_a_lone_prefill_is_told_and_kept() -> None:
    world = Served(lambda p: p.prefill.uid == lame, prefill__replicas=1)
    lame = first_prefill(world)
    world.run_for(600)
    assert world.deleted == []
    assert f"delete pod {world.pods[lame].name}" in world.condition("KVTransferVerified")["message"]


def test_switched_off_it_only_tells() -> None:
    world = Served(lambda p: p.prefill.uid == lame, transfer__verification={"recycle": False})
    lame = first_prefill(world)
    world.run_for(600)
    assert world.deleted == []
    told = world.condition("KVTransferVerified")
    assert told["reason"] == "PrefillDoesNotSend" and f"delete pod {world.pods[lame].name}" in told["message"]


def test_one_that_fails_again_and_again_is_replaced_more_and_more_rarely() -> None:
    world = Served(lambda p: world.pods[p.prefill.uid].replica == 0 if p.prefill.uid in world.pods else True)
    world.run_for(1500)
    times = [at for at, d in world.deleted if d.reason == "Recycled"]
    waits = [round(b - a) for a, b in itertools.pairwise(times)]
    # Each time the finding takes as long, and the pause before the next attempt doubles: 10, 20, 40, 80 s.
    assert len(waits) >= 3 and all(b - a >= 5 for a, b in itertools.pairwise(waits)), waits


def test_an_operator_that_starts_anew_needs_the_evidence_again_and_then_replaces_it() -> None:
    world = Served(lambda p: p.prefill.uid == lame)
    lame = first_prefill(world)
    world.run_for(50)
    assert world.deleted == []
    world.restart_operator()
    began = world.now
    world.run_for(300)
    ((at, deleted),) = world.deleted
    assert deleted.uid == lame and at - began > SETTINGS.recycle_seconds


def test_with_our_own_backend_the_switch_has_no_effect_and_the_fit_check_says_so() -> None:
    spec = World(quickstart(transfer__verification={"recycle": False})).spec
    assert spec is not None
    (finding,) = [f for f in preflight(spec).of("Warn") if f.rule == "NoEffectYet"]
    assert "spec.transfer.verification.recycle has no effect" in finding.message
