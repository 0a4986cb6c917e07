"""Proof by real requests in a whole cluster: what status, events and the rollout make of it."""

from __future__ import annotations

from typing import Any

import pytest
from domain_makers import quickstart
from domain_told import told
from domain_world import World

from pdoperator.domain.actions import StartProbe
from pdoperator.domain.realprobe import ProbeOutcome, ProbeResult
from pdtransfer.contract.base import Role

KIND = "KVTransferVerified"


class Requests(World):
    """A PDCluster with backend NIXL whose real requests end as `outcome` says."""

    def __init__(self, **changes: Any) -> None:
        self.outcome = ProbeOutcome.SERVED
        self.broken = ""
        raw = {"transfer__backend": "NIXL", "engine": {"type": "SGLang", "image": "sg:1"}}
        super().__init__(quickstart(**raw | {"prefill__tensorParallelSize": 1} | changes))

    def answered(self, probe: StartProbe) -> ProbeResult:
        bad = not self.broken or self.broken in (probe.prefill.name, probe.decode.name)
        outcome = self.outcome if bad else ProbeOutcome.SERVED
        return ProbeResult(probe, outcome, "no answer within 30 s", 0.25, self.now)


def test_a_cluster_is_ready_when_real_requests_were_served() -> None:
    w = Requests()
    w.run()
    status, reason, message = told(w, KIND)
    assert (status, reason) == ("True", "Verified")
    assert message.startswith("1 prefill rank and 2 decode pods served a real request")
    assert w.condition("Ready")["status"] == "True"
    assert w.status["summary"]["verified"] == "by request"


def test_requests_that_go_on_being_served_write_nothing() -> None:
    w = Requests()
    w.run()
    w.probed.clear()
    writes = sum(w.step().status is not None for _ in range(200))
    assert len(w.probed) >= 3 and writes == 0


def test_until_then_it_waits_for_them() -> None:
    w = Requests()
    while not w.probed:
        w.step()
    assert told(w, KIND)[:2] == ("Unknown", "Verifying")
    assert w.condition("Ready")["status"] != "True"


def test_requests_that_fail_make_it_not_ready_with_an_event_and_an_advice() -> None:
    w = Requests()
    w.outcome = ProbeOutcome.TIMED_OUT
    for _ in range(30):
        w.step()
    status, reason, message = told(w, KIND)
    assert (status, reason) == ("False", "RequestFailed")
    assert "no answer within 30 s" in message and "delete pod" in message
    assert w.condition("Ready")["reason"] == "RequestFailed"
    assert [e.type for e in w.events if e.reason == "VerificationFailed"] == ["Warning"]
    # It says what is wrong, and takes nothing away by itself.
    assert len(w.routed()) == 3 and len(w.pods) == 3


def test_a_prefill_beside_a_working_one_is_named() -> None:
    w = Requests(prefill__replicas=2, transfer__verification={"recycle": False})
    w.run()
    w.broken, w.outcome = w.side(Role.PREFILL)[1].name, ProbeOutcome.TIMED_OUT
    for _ in range(150):
        w.step()
    assert told(w, KIND)[:2] == ("False", "PrefillDoesNotSend") and w.broken in told(w, KIND)[2]


def test_a_decode_beside_a_working_one_is_named() -> None:
    w = Requests()
    w.step()
    w.broken, w.outcome = w.side(Role.DECODE)[1].name, ProbeOutcome.FAILED
    for _ in range(100):
        w.step()
    assert told(w, KIND)[:2] == ("False", "DecodeDoesNotReceive") and w.broken in told(w, KIND)[2]


def test_an_engine_that_the_operator_can_not_ask_leaves_the_cluster_ready_and_says_so() -> None:
    w = Requests()
    w.outcome = ProbeOutcome.UNAUTHORIZED
    for _ in range(20):
        w.step()
    assert told(w, KIND)[:2] == ("Unknown", "CannotProbe")
    assert w.condition("Ready")["status"] == "True"
    assert "KVTransferVerified (CannotProbe)" in w.condition("Ready")["message"]


def test_an_operator_that_starts_again_proves_again_and_blames_nobody_meanwhile() -> None:
    w = Requests()
    w.run()
    before = told(w, KIND)
    w.restart_operator()
    w.probed.clear()
    for _ in range(5):
        w.step()
        assert told(w, KIND) == before and w.condition("Ready")["status"] == "True"
    assert len(w.probed) == 2  # nothing is taken over from the old process: both decodes are asked again


def test_an_operator_that_starts_again_finds_what_broke_meanwhile() -> None:
    w = Requests()
    w.run()
    w.restart_operator()
    w.outcome = ProbeOutcome.TIMED_OUT
    for _ in range(3):
        w.step()
    assert told(w, KIND)[0] == "Unknown"
    for _ in range(20):
        w.step()
    assert told(w, KIND)[0] == "False"


def test_a_proof_of_another_spec_is_not_held() -> None:
    w = World(quickstart())
    w.run()
    assert told(w, KIND)[:2] == ("True", "Verified")
    w.edit(quickstart(transfer__backend="NIXL"))
    w.step()
    assert told(w, KIND)[0] == "Unknown"


def test_a_decode_that_comes_to_a_proven_cluster_does_not_undo_its_proof() -> None:
    w = Requests()
    w.run()
    w.edit(w.raw | {"decode": {"replicas": 3, "tensorParallelSize": 1}})
    w.probed.clear()
    for _ in range(10):
        w.step()
        assert told(w, KIND)[0] == "True"
    assert w.side(Role.DECODE)[2].name in {p.decode.name for p in w.probed}
    assert "3 decode pods" in told(w, KIND)[2]


def test_a_pod_that_leaves_is_not_probed() -> None:
    w = Requests()
    w.run()
    gone = w.side(Role.DECODE)[1]
    w.edit(w.raw | {"decode": {"replicas": 1, "tensorParallelSize": 1}})
    w.probed.clear()
    for _ in range(130):
        w.step()
    assert w.probed and all(p.decode.uid != gone.uid for p in w.probed)
    assert told(w, KIND)[0] == "True"


def test_the_interval_of_the_spec_is_the_pause_between_requests() -> None:
    w = Requests(transfer__verification={"intervalSeconds": 20}, decode__replicas=1)
    w.run()
    w.probed.clear()
    for _ in range(63):
        w.step()
    assert len(w.probed) == 3


@pytest.mark.parametrize(
    "args, ranks", [([], {0, 1}), (["--load-balance-method=round_robin"], {0}), (["--load-balance", "auto"], {0, 1})]
)
def test_attention_data_parallel_ranks_are_met_where_the_room_chooses_them(args: list[str], ranks: set[int]) -> None:
    w = Requests(prefill__tensorParallelSize=2, prefill__attentionDataParallelSize=2, prefill__extraArgs=args)
    w.run()
    assert {p.dp_rank for p in w.probed} == ranks
    assert {p.dp_size for p in w.probed} == {len(ranks)}


def test_pdclusters_own_backend_sends_no_requests() -> None:
    w = World(quickstart())
    w.run()
    assert w.probed == []
