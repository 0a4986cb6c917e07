"""Proof by real requests (backends NIXL, Mooncake): who is probed with whom, when, and whose fault a failure is.

A small simulation stands for the pods: it says for each probe whether the pair serves, and time goes on in seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoperator.api.conditions import ConditionStatus, Reason
from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.realprobe import History, ProbeOutcome, ProbeResult, Unit, due_probes, forget, remember
from pdoperator.domain.realproof import RealProof, prove, verified_by_requests
from pdoperator.domain.settings import DecideSettings

SETTINGS = DecideSettings()
INTERVAL = 60.0
Says = Callable[[StartProbe], ProbeOutcome]


def end(name: str, restarts: int = 0) -> ProbeEnd:
    return ProbeEnd(name, f"uid-{name}", "10.0.0.1", restarts)


class Fleet:
    """P prefill pods of `dp` ranks and D decode pods in one island; each probe takes `takes` seconds."""

    def __init__(self, prefill: int, decode: int, says: Says, *, dp: int = 1, takes: float = 1.0) -> None:
        self.units = [Unit(end(f"p{i}"), rank, dp, "r1") for i in range(prefill) for rank in range(dp)]
        self.decodes = {"r1": tuple(end(f"d{i}") for i in range(decode))}
        self.says, self.takes = says, takes
        self.history: History = {}
        self.now = 1000.0
        self.under_way: list[tuple[float, StartProbe]] = []
        self.started: list[tuple[float, StartProbe]] = []

    def step(self) -> None:
        """A look each second."""
        ended = [(at, p) for at, p in self.under_way if at <= self.now]
        self.under_way = [(at, p) for at, p in self.under_way if at > self.now]
        results = [ProbeResult(p, self.says(p), "no answer", 0.5, at) for at, p in ended]
        self.history = forget(remember(self.history, results), self.units, self.decodes)
        running = [p for _, p in self.under_way]
        for probe in due_probes(self.units, self.decodes, self.history, running, INTERVAL, self.now, SETTINGS):
            assert probe.prefill.incarnation not in {p.prefill.incarnation for _, p in self.under_way}
            self.under_way.append((self.now + self.takes, probe))
            self.started.append((self.now, probe))
        assert len(self.under_way) <= SETTINGS.probes_at_once
        self.now += 1

    def run(self, seconds: int) -> RealProof:
        for _ in range(seconds):
            self.step()
        return self.proof()

    def proof(self) -> RealProof:
        return prove(self.units, self.decodes, self.history, SETTINGS)


def served(_: StartProbe) -> ProbeOutcome:
    return ProbeOutcome.SERVED


def fails(prefill: str = "", decode: str = "", how: ProbeOutcome = ProbeOutcome.TIMED_OUT) -> Says:
    """Every pair with this prefill or this decode."""
    return lambda p: how if prefill == p.prefill.name or decode == p.decode.name else ProbeOutcome.SERVED


@pytest.mark.parametrize("prefill, decode, probes", [(1, 1, 1), (1, 3, 3), (3, 1, 3), (2, 2, 2), (2, 5, 5)])
def test_at_first_each_prefill_and_each_decode_takes_part_once(prefill: int, decode: int, probes: int) -> None:
    fleet = Fleet(prefill, decode, served)
    proof = fleet.run(20)
    assert proof.complete and (proof.served, proof.met) == (prefill, decode)
    assert len(fleet.started) == probes == max(prefill, decode)


def test_afterwards_each_prefill_once_an_interval_with_its_decodes_in_turn() -> None:
    fleet = Fleet(1, 3, served)
    fleet.run(10)
    fleet.started.clear()
    fleet.run(int(3 * INTERVAL) + 10)
    assert [p.decode.name for _, p in fleet.started] == ["d0", "d1", "d2"]
    gaps = [b[0] - a[0] for a, b in zip(fleet.started, fleet.started[1:], strict=False)]
    assert all(INTERVAL <= gap <= INTERVAL + 3 for gap in gaps)


def test_every_attention_data_parallel_rank_of_prefill_is_met_one_after_the_other() -> None:
    fleet = Fleet(1, 1, served, dp=4, takes=3.0)
    assert not fleet.run(3).complete
    assert fleet.run(20).complete
    assert sorted(p.dp_rank for _, p in fleet.started) == [0, 1, 2, 3]
    assert all(p.dp_size == 4 for _, p in fleet.started)


def test_one_rank_that_serves_does_not_speak_for_another() -> None:
    fleet = Fleet(1, 1, lambda p: ProbeOutcome.TIMED_OUT if p.dp_rank == 1 else ProbeOutcome.SERVED, dp=2)
    proof = fleet.run(30)
    assert proof.failed and "prefill p0 (data-parallel rank 1)" in proof.failed and proof.served == 1


def test_a_prefill_that_no_decode_gets_kv_from_is_blamed_where_another_prefill_works() -> None:
    proof = Fleet(2, 1, fails(prefill="p1")).run(30)
    assert proof.reason is Reason.PREFILL_DOES_NOT_SEND
    assert "prefill p1" in proof.failed and "delete pod p1" in proof.failed
    assert "d0 gets KV from another" in proof.failed


def test_a_decode_that_gets_kv_from_nobody_is_blamed_where_its_prefill_serves_others() -> None:
    proof = Fleet(1, 2, fails(decode="d1")).run(60)
    assert proof.reason is Reason.DECODE_DOES_NOT_RECEIVE and "delete pod d1" in proof.failed
    assert proof.served == 1


def test_a_lone_pair_that_fails_is_told_without_blame() -> None:
    proof = Fleet(1, 1, fails(prefill="p0")).run(30)
    assert proof.reason is Reason.REQUEST_FAILED
    assert "prefill p0 to decode d0" in proof.failed and "no answer" in proof.failed


def test_one_failure_alone_says_nothing_yet() -> None:
    fleet = Fleet(1, 1, served)
    assert fleet.run(5).complete
    fleet.says = fails(prefill="p0")
    while fleet.proof().served and not any(s.failures for s in fleet.history.values()):
        fleet.step()
    assert not fleet.proof().failed
    assert fleet.run(10).failed  # the second, after the short pause


def test_a_failure_is_tried_again_soon_and_then_more_rarely() -> None:
    fleet = Fleet(1, 1, fails(prefill="p0"))
    fleet.run(300)
    gaps = [b[0] - a[0] for a, b in zip(fleet.started, fleet.started[1:], strict=False)]
    # A probe takes 1 s; then the pause: 5, 10, 20, 40, 60, 60 ... seconds.
    assert gaps[:6] == [6, 11, 21, 41, 61, 61]


def test_what_works_again_is_proven_again() -> None:
    fleet = Fleet(2, 2, fails(prefill="p0"))
    assert fleet.run(40).failed
    fleet.says = served
    assert fleet.run(70).complete


def test_a_restart_forgets_what_was_held_against_the_pod() -> None:
    fleet = Fleet(2, 1, fails(prefill="p1"))
    assert fleet.run(30).failed
    fleet.says = served
    fleet.units = [u if u.prefill.name != "p1" else Unit(end("p1", 1), 0, 1, "r1") for u in fleet.units]
    fleet.step()
    assert not fleet.proof().failed
    assert fleet.run(3).complete


@pytest.mark.parametrize("how", [ProbeOutcome.UNREACHABLE, ProbeOutcome.UNAUTHORIZED, ProbeOutcome.BUSY])
def test_what_the_operator_can_not_find_out_is_no_failure(how: ProbeOutcome) -> None:
    proof = Fleet(1, 1, fails(prefill="p0", how=how)).run(200)
    assert not proof.failed and not proof.complete and proof.open
    aspect = verified_by_requests(proof, "NIXL", False)
    assert (aspect.status, aspect.reason, aspect.required) == (ConditionStatus.UNKNOWN, Reason.CANNOT_PROBE, False)


def test_a_busy_engine_does_not_undo_a_proof() -> None:
    fleet = Fleet(1, 1, served)
    fleet.run(5)
    fleet.says = fails(prefill="p0", how=ProbeOutcome.BUSY)
    assert fleet.run(200).complete


def test_pods_of_different_revisions_are_never_paired() -> None:
    fleet = Fleet(1, 1, served)
    fleet.units.append(Unit(end("p9"), 0, 1, "r2"))
    fleet.decodes["r3"] = (end("d9"),)
    proof = fleet.run(20)
    assert {(p.prefill.name, p.decode.name) for _, p in fleet.started} == {("p0", "d0")}
    assert (proof.units, proof.decodes) == (1, 1)  # the others can not serve anybody


def test_a_decode_that_hangs_is_not_given_every_prefill() -> None:
    fleet = Fleet(8, 2, served, takes=1.0)
    fleet.run(10)
    fleet.decodes["r1"] = (*fleet.decodes["r1"], end("d9"))
    fleet.says, fleet.takes = fails(decode="d9"), 30.0
    fleet.started.clear()
    fleet.run(29)
    assert [p.decode.name for _, p in fleet.started].count("d9") == 1


def test_a_large_fleet_is_not_probed_at_once() -> None:
    fleet = Fleet(40, 40, served, takes=5.0)
    fleet.step()
    assert len(fleet.started) == SETTINGS.probes_at_once == 16
    assert fleet.run(40).complete and len(fleet.started) == 40


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sets(st.sampled_from(["p0", "p1", "p2"]), max_size=2),
    st.sets(st.sampled_from(["d0", "d1", "d2"]), max_size=2),
)
def test_only_what_is_broken_is_blamed_and_what_is_broken_is_found(
    prefill: int, decode: int, bad_p: set[str], bad_d: set[str]
) -> None:
    def says(p: StartProbe) -> ProbeOutcome:
        bad = p.prefill.name in bad_p or p.decode.name in bad_d
        return ProbeOutcome.FAILED if bad else ProbeOutcome.SERVED

    fleet = Fleet(prefill, decode, says)
    proof = fleet.run(400)
    here_p = bad_p & {u.prefill.name for u in fleet.units}
    here_d = bad_d & {d.name for d in fleet.decodes["r1"]}
    assert bool(proof.failed) == bool(here_p or here_d)
    assert proof.complete == (not here_p and not here_d)
    if proof.reason is Reason.PREFILL_DOES_NOT_SEND:
        assert proof.failed.split()[1].rstrip(":") in here_p
    if proof.reason is Reason.DECODE_DOES_NOT_RECEIVE:
        assert proof.failed.split()[1].rstrip(":") in here_d


def test_a_rule_that_blames_the_first_failure_would_be_found() -> None:
    # The control of test_one_failure_alone_says_nothing_yet.
    fleet = Fleet(1, 1, fails(prefill="p0"))
    fleet.run(3)
    hasty = DecideSettings(probe_failures=1)
    assert prove(fleet.units, fleet.decodes, fleet.history, hasty).failed
    assert not fleet.proof().failed
