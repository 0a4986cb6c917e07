"""decide() against a world that obeys it: from nothing to Ready, and back to Ready after each fault."""

from __future__ import annotations

from dataclasses import replace

from domain_makers import quickstart
from domain_world import World, ready_world

from pdoperator.domain.actions import (
    IssueCertificate,
)
from pdoperator.domain.decide import decide
from pdtransfer.contract.base import Role


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
