"""What status says: causes told apart, the rollup, transition times, fabric, verification, links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from domain_makers import UID, make_cards, quickstart
from domain_world import World

from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.domain.actions import PodBackoff
from pdoperator.domain.condition import no, roll_up, to_conditions, unknown, yes
from pdoperator.domain.decide import decide
from pdoperator.domain.lifecycle import next_backoff
from pdoperator.domain.links import Blame, LinkState, Told, against, blame, judge, rank_pairs, told_by
from pdoperator.domain.observed import ContainerSeen, NodeOffer, PodSeen
from pdoperator.domain.poddiagnosis import diagnose
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.verification import verify
from pdoperator.domain.view import Peer
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import PodCards
from pdtransfer.contract.verdict import PodVerdicts, Verdict, VerdictState

SETTINGS = DecideSettings()


def pod(**changes: Any) -> PodSeen:
    base = PodSeen(
        name="c-decode-0", uid="u", role="decode", replica=0, revision="r", attempt=0, phase="Running", deleting=False,
        node="n", ip="10.0.0.1", ready=False, containers_ready=False, scheduled=True, unschedulable_message="",
        kv_wired="", kv_wired_since=0.0, created=0.0,
        containers=(ContainerSeen("pdtransfer", running=True), ContainerSeen("engine", running=True)),
    )  # fmt: skip
    return replace(base, **changes)


def engine(**changes: Any) -> tuple[ContainerSeen, ...]:
    return (ContainerSeen("pdtransfer", running=True, ready=True), ContainerSeen("engine", **changes))


@pytest.mark.parametrize(
    ("seen", "wired", "reason", "says"),
    [
        (
            pod(scheduled=False, phase="Pending", unschedulable_message="0/2 nodes: insufficient nvidia.com/gpu"),
            False,
            Reason.CANNOT_SCHEDULE,
            "nvidia.com/gpu",
        ),
        (pod(scheduled=False, phase="Pending"), False, Reason.LAUNCHING, "scheduler"),
        (
            pod(containers=engine(waiting_reason="ImagePullBackOff", waiting_message="not found")),
            False,
            Reason.CANNOT_PULL_IMAGE,
            "not found",
        ),
        (
            pod(containers=engine(waiting_reason="CreateContainerConfigError", waiting_message="no secret")),
            False,
            Reason.CANNOT_START,
            "no secret",
        ),
        (
            pod(
                containers=engine(
                    waiting_reason="CrashLoopBackOff",
                    restarts=3,
                    last_exit_code=137,
                    last_exit_reason="OOMKilled",
                    last_exit_message="CUDA out of memory",
                )
            ),
            False,
            Reason.CRASHING,
            "engine exited with 137 OOMKilled: CUDA out of memory",
        ),
        (pod(containers=engine(running=True)), False, Reason.LOADING, "loading"),
        (pod(containers=engine(running=True)), True, Reason.WIRED_BUT_FAILING, "wired"),
        (pod(containers=engine(running=True, ready=True)), False, Reason.WAITING_FOR_WIRING, "no peer"),
        (pod(phase="Failed", containers=engine(last_exit_code=1)), False, Reason.CRASHING, "exited with 1"),
    ],
)
def test_causes_are_told_apart(seen: PodSeen, wired: bool, reason: Reason, says: str) -> None:
    found, message = diagnose(seen, wired, "no peer answered", True)
    assert found is reason
    assert says in message


def test_ready_carries_the_first_failing_childs_reason_and_false_goes_before_unknown() -> None:
    aspects = [
        yes(ConditionType.COMPATIBLE, Reason.FITS, "ok"),
        unknown(ConditionType.FABRIC_READY, Reason.NOT_OBSERVED_YET, "not seen"),
        no(ConditionType.PREFILL_READY, Reason.LOADING, "p loads"),
        no(ConditionType.DECODE_READY, Reason.CRASHING, "d crashes"),
    ]
    ready = roll_up(aspects)
    # What loads, or waits for its peers, is no failure: the crash is why nothing serves.
    assert (ready.status.value, ready.reason, ready.message) == ("False", Reason.CRASHING, "DecodeReady: d crashes")
    assert roll_up(aspects[:3]).message == "PrefillReady: p loads"
    assert roll_up(aspects[:2]).status.value == "Unknown"
    ignored = replace(aspects[1], required=False)
    whole = roll_up([aspects[0], ignored])
    assert (whole.status.value, whole.message) == (
        "True",
        "Every condition that is required holds. Not known, and not waited for: FabricReady (NotObservedYet).",
    )


def test_transition_time_moves_with_the_status_only() -> None:
    first = to_conditions([no(ConditionType.COMPATIBLE, Reason.DOES_NOT_FIT, "a")], [], 1, 100.0)
    old = [c.model_dump(by_alias=True, mode="json") for c in first]
    same = to_conditions([no(ConditionType.COMPATIBLE, Reason.INVALID_SPEC, "b")], old, 2, 200.0)
    assert same[0].last_transition_time == "1970-01-01T00:01:40Z"
    assert (same[0].reason, same[0].observed_generation) == ("InvalidSpec", 2)
    turned = to_conditions([yes(ConditionType.COMPATIBLE, Reason.FITS, "c")], old, 3, 300.0)
    assert turned[0].last_transition_time == "1970-01-01T00:05:00Z"


def test_backoff_doubles_up_to_five_minutes() -> None:
    b = PodBackoff()
    waits = []
    for _ in range(7):
        b = next_backoff(b, 0.0, "exit 1", SETTINGS)
        waits.append(b.not_before)
    assert waits == [10, 20, 40, 80, 160, 300, 300]


def rdma_world(nodes: tuple[NodeOffer, ...] | None) -> World:
    w = World(quickstart(transfer__fabric={"type": "RDMA", "resources": [{"name": "rdma/hca", "count": 1}]}))
    observed = replace(w.observe(), nodes=nodes)
    w.act(decide(observed, w.memory, w.settings))
    return w


def test_a_resource_no_node_offers_is_named_with_what_nodes_do_offer() -> None:
    w = rdma_world((NodeOffer("n1", {"rdma/hca": 0, "rdma/ib": 8}),))
    c = w.condition("FabricReady")
    assert (c["status"], c["reason"]) == ("False", "ResourceNotOffered")
    assert "rdma/hca" in c["message"] and "rdma/ib" in c["message"]


@pytest.mark.parametrize(
    ("devices", "transport", "status", "reason"),
    [
        ((), "TCP", "False", "RDMANotFound"),
        (("mlx5_0",), "TCP", "False", "SilentTCP"),
        (("mlx5_0",), "Unknown", "Unknown", "NotImplementedYet"),
        (("mlx5_0",), "RDMA", "True", "FabricVerified"),
    ],
)
def test_rdma_holds_only_on_the_evidence_of_the_adapters(
    devices: tuple[str, ...], transport: str, status: str, reason: str
) -> None:
    w = rdma_world((NodeOffer("n1", {"rdma/hca": 100}),))
    w.transport = transport
    for _ in range(4):
        for p in w.pods.values():
            p.devices = devices
        w.step()
    c = w.condition("FabricReady")
    assert (c["status"], c["reason"]) == (status, reason)
    assert w.condition("Ready")["status"] == ("True" if status == "True" else status)


def peer(name: str, role: Role, tp: int, incarnation: str = "i1") -> Peer:
    cards = PodCards(
        cluster_uid=UID,
        pod_uid=name,
        role=role,
        incarnation=incarnation,
        expected_ranks=tp,
        cards=make_cards(name, role, incarnation, tp),
    )
    return Peer(pod(name=name, uid=name, role=role.value), cards, "x")


def told(own: Peer, other: Peer, state: VerdictState, **changes: Any) -> Told | None:
    verdicts = [
        Verdict(
            rank=a.rank,
            incarnation=own.cards.incarnation,
            peer_pod_uid=other.uid,
            peer_incarnation=changes.get("peer_incarnation", other.cards.incarnation),
            peer_rank=b.rank,
            state=state,
            bytes_moved=1000,
            seconds=changes.get("seconds", 1e-6),
            bandwidth=changes.get("bandwidth", 0.0),
            checksum_ok=changes.get("checksum_ok", True),
            transport="tcp",
            at=changes.get("at", 1.0),
        )
        for a in own.cards.cards
        for b in other.cards.cards
    ]
    return told_by(
        PodVerdicts(
            cluster_uid=UID,
            pod_uid=own.uid,
            role=own.role,
            incarnation=own.cards.incarnation,
            verdicts=tuple(verdicts),
        )
    )


P, D = peer("p", Role.PREFILL, 2), peer("d", Role.DECODE, 1)


def test_tp_2_to_tp_1_is_two_rank_pairs() -> None:
    assert rank_pairs(P, D) == {(0, 0), (1, 0)}


@pytest.mark.parametrize(
    ("of_p", "of_d", "state"),
    [
        (VerdictState.WIRED, VerdictState.WIRED, LinkState.GOOD),
        (VerdictState.WIRED, VerdictState.PROBING, LinkState.PENDING),
        (VerdictState.REFUSED, VerdictState.WIRED, LinkState.REFUSED),
        (VerdictState.WIRED, VerdictState.UNREACHABLE, LinkState.UNREACHABLE),
        (VerdictState.WIRED, None, LinkState.GOOD),
        (None, None, LinkState.UNKNOWN),
    ],
)
def test_a_link_needs_both_sides_that_report(
    of_p: VerdictState | None, of_d: VerdictState | None, state: LinkState
) -> None:
    link = judge(P, D, told(P, D, of_p) if of_p else None, told(D, P, of_d) if of_d else None, rank_pairs(P, D))
    assert link.state is state


def test_findings_about_an_older_incarnation_do_not_count_and_tell_that_it_was_replaced() -> None:
    link = judge(
        P, D, told(P, D, VerdictState.WIRED, peer_incarnation="i0"), told(D, P, VerdictState.WIRED), rank_pairs(P, D)
    )
    assert link.state is not LinkState.GOOD
    old = told(P, D, VerdictState.WIRED, peer_incarnation="i0")
    empty = told_by(PodVerdicts(cluster_uid=UID, pod_uid="d", role=Role.DECODE, incarnation="i1"))
    assert judge(P, D, old, empty, rank_pairs(P, D)).state is LinkState.REPLACED


def test_unreachable_takes_several_findings_or_some_seconds() -> None:
    def look(at: float) -> Any:
        return judge(P, D, told(P, D, VerdictState.UNREACHABLE, at=at), None, rank_pairs(P, D))

    blamed: dict[tuple[str, str], Blame] = {}
    for i, expected in ((1.0, False), (1.0, False), (2.0, False), (3.0, True)):
        link = look(i)
        blamed = blame({link.key: link}, blamed, 10.0)
        assert against(link, blamed, 10.0, SETTINGS) is expected
    link = look(1.0)
    blamed = blame({link.key: link}, {}, 10.0)
    assert against(link, blamed, 14.9, SETTINGS) is False
    assert against(link, blamed, 15.0, SETTINGS) is True


def test_verification_reports_the_slowest_rank_pair_and_fails_on_a_bad_checksum() -> None:
    # 1000 bytes in 1 microsecond are 1 GB/s; the decode side measured 2 microseconds: 0.5 GB/s.
    link = judge(P, D, told(P, D, VerdictState.WIRED), told(D, P, VerdictState.WIRED, seconds=2e-6), rank_pairs(P, D))
    proof = verify([link])
    assert (proof.pairs, proof.proven, proof.bytes) == (1, 1, 4000)
    assert proof.bandwidth == pytest.approx(0.5e9)
    assert proof.text == "500 MB/s tcp"
    bad = judge(P, D, told(P, D, VerdictState.WIRED, checksum_ok=False), None, rank_pairs(P, D))
    assert verify([bad]).failed


def test_bandwidth_is_that_of_the_large_write_where_the_sidecar_tells_it() -> None:
    # Small READs make the whole probe slow; the large WRITE ran at 3 GB/s here and 2 GB/s there.
    link = judge(
        P,
        D,
        told(P, D, VerdictState.WIRED, bandwidth=3e9),
        told(D, P, VerdictState.WIRED, seconds=1.0, bandwidth=2e9),
        rank_pairs(P, D),
    )
    assert verify([link]).bandwidth == pytest.approx(2e9)


def test_too_little_bandwidth_is_named() -> None:
    w = World(quickstart(transfer__verification={"minBandwidth": "10G"}))
    for _ in range(8):
        w.step()
    c = w.condition("KVTransferVerified")
    assert (c["status"], c["reason"]) == ("False", "BelowMinBandwidth")
    assert "moved 410 MB/s, less than minBandwidth 10.0 GB/s" in c["message"]


def test_certificates_are_renewed_also_while_the_spec_is_invalid() -> None:
    from pdoperator.domain.actions import IssueCertificate

    w = World(quickstart())
    w.run()
    w.edit({"nonsense": 1})
    w.certificate = w.now + 60
    d = w.step()
    assert any(isinstance(a, IssueCertificate) for a in d.actions)


def test_equal_input_gives_an_equal_decision() -> None:
    w = World(quickstart())
    for _ in range(3):
        w.step()
    assert decide(w.observe(), w.memory, SETTINGS) == decide(w.observe(), w.memory, SETTINGS)
