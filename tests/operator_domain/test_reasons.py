"""Every reason that a condition or an event can carry: the operator writes it, and a user sees it where it belongs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from domain_makers import quickstart
from domain_told import told, told_of
from domain_world import World

import pdoperator
from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.domain.observed import NodeOffer
from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import Verdict


def settled(**changes: Any) -> World:
    w = World(quickstart(**changes))
    w.run()
    return w


def test_every_reason_is_written_somewhere() -> None:
    root = Path(pdoperator.__file__).parent
    source = "".join(p.read_text() for p in root.rglob("*.py") if p.name != "conditions.py")
    used = set(re.findall(r"Reason\.([A-Z_]+)", source))
    assert {r.name for r in Reason} - used == set()
    assert {c.name for c in ConditionType} - set(re.findall(r"ConditionType\.([A-Z_]+)", source)) == set()


def test_a_quiet_cluster_without_a_router() -> None:
    w = settled(router={"type": "None"})
    assert told(w, "RouterReady")[:2] == ("True", "NotRequired")
    assert told(w, "PrefillReady") == ("True", "PodsReady", "1 of 1 prefill replicas ready")
    assert told(w, "Progressing") == ("True", "Stable", "nothing is under way")


def test_what_fits_with_a_warning_says_how_many() -> None:
    w = settled(decode__env=[{"name": "NCCL_IB_HCA", "value": "mlx5_0"}])
    status, reason, message = told(w, "Compatible")
    assert (status, reason) == ("True", "FitsWithWarnings")
    assert "1 warning (see status.warnings)" in message


def test_a_spec_that_tells_too_little_waits_for_the_cards() -> None:
    w = World(quickstart(model={"servedName": "tiny", "volume": {"configMap": {"name": "tiny"}}}))
    w.step()
    status, reason, message = told(w, "Compatible")
    assert (status, reason) == ("Unknown", "WaitingForCards")
    assert "nothing is wired before the ranks' cards decide" in message
    w.run()
    assert told(w, "Compatible")[:2] == ("True", "Fits")


def test_what_does_not_fit_launches_nothing_and_says_so_in_three_places() -> None:
    w = World(quickstart(prefill__nodesPerReplica=2))
    w.step()
    assert told(w, "Compatible")[:2] == ("False", "DoesNotFit")
    assert told(w, "PrefillReady")[:2] == ("False", "NotLaunched")
    assert told(w, "RouterReady")[:2] == ("False", "NotLaunched")
    assert told(w, "Progressing")[:2] == ("False", "Blocked")
    assert not w.pods


def test_nodes_that_offer_less_than_a_pod_wants() -> None:
    fabric = {"type": "RDMA", "resources": [{"name": "rdma/hca", "count": 2}]}
    w = World(quickstart(transfer__fabric=fabric))
    seen = replace(w.observe(), nodes=(NodeOffer("n", {"rdma/hca": 1}),))
    status, reason, message = told_of(w, seen, "FabricReady")
    assert (status, reason) == ("False", "ResourceExhausted")
    assert "2 of rdma/hca per pod were asked for, but no node offers more than 1" in message


def test_one_decode_that_loads_leaves_the_rest_wired() -> None:
    w = World(quickstart())
    w.step()
    w.side(Role.DECODE)[1].engine = "slow"
    for _ in range(6):
        w.step()
    status, reason, message = told(w, "PeersWired")
    assert (status, reason) == ("False", "PartlyWired")
    assert message.startswith("wired: 1 of 1 prefill, 1 of 2 decode")


class Probing(World):
    """Its pods' probes end as `probe` says."""

    probe: dict[str, Any]

    def verdicts(self, pod: Any) -> tuple[Verdict, ...]:
        return tuple(v.model_copy(update=getattr(self, "probe", {})) for v in super().verdicts(pod))


def test_pairs_whose_probe_moved_nothing_yet_are_being_verified() -> None:
    w = Probing(quickstart())
    w.run()
    w.probe = {"bytes_moved": 0}
    w.step()
    assert told(w, "KVTransferVerified") == ("Unknown", "Verifying", "0 of 2 pairs proven by moved and checked bytes")


def test_bytes_that_changed_on_their_way_fail_the_verification_and_tell_an_event() -> None:
    w = Probing(quickstart())
    w.run()
    w.probe = {"checksum_ok": False}
    w.step()
    assert told(w, "KVTransferVerified")[:2] == ("False", "VerificationFailed")
    assert [e.type for e in w.events if e.reason == "VerificationFailed"] == ["Warning"]


def test_a_router_that_starts_that_lists_nothing_and_that_does_not_answer() -> None:
    w = World(quickstart())
    w.step()
    assert told(w, "RouterReady")[:2] == ("False", "RouterStarting")
    w.run()
    assert told(w, "RouterReady")[:2] == ("True", "RouterReady")
    seen = w.observe()
    (router,) = seen.routers
    empty = replace(seen, routers=(replace(router, workers=()),))
    assert told_of(w, empty, "RouterReady")[:2] == ("False", "RouterHasNoPair")
    silent = replace(seen, routers=(replace(router, workers=None, error="no answer within 2 s"),))
    status, reason, message = told_of(w, silent, "RouterReady")
    assert (status, reason) == ("False", "RouterUnreachable")
    assert message.endswith("no answer within 2 s")


def test_a_rollout_says_how_much_is_left() -> None:
    w = settled()
    w.edit(quickstart(engine__image="pd:2"))
    w.step()
    assert told(w, "Progressing")[:2] == ("True", "Rolling")


def test_a_replica_that_failed_is_launched_again_after_its_backoff() -> None:
    w = settled()
    pod = w.side(Role.DECODE)[0]
    pod.phase, pod.exit_code = "Failed", 1
    w.step()
    assert [e.type for e in w.events if e.reason == "Recycled"] == ["Warning"]
    w.step()
    assert told(w, "Progressing")[:2] == ("False", "BackingOff")


def test_a_pod_that_goes_as_planned_tells_why() -> None:
    w = settled()
    w.edit(quickstart(decode__replicas=1))
    w.run()
    (event,) = [e for e in w.events if e.reason == "Deleted"]
    assert event.type == "Normal"
    assert event.message.endswith("scaled to 1 replica")


@pytest.mark.parametrize("reason", list(Reason))
def test_reasons_are_words_that_kubernetes_takes(reason: Reason) -> None:
    # metav1.Condition: reason must match this pattern.
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", reason.value)
