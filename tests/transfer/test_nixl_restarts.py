"""Fact 2 over real NIXL: an engine that dies in mid-transfer and comes back in the same pod, under the same address
and port. The new incarnation is a new peer, and the old request never resumes."""

from __future__ import annotations

import signal
import time

import pytest
from nixl_ranks import RankProcess, Ranks

from free_ports import free_port
from pdtransfer.contract.card import RankCard

pytestmark = pytest.mark.nixl
BIG = 50_000
"""Pages of 2 layers * (K 256 + V 512 bytes): 77 MB, a tenth of a second and more over TCP."""


def start(ranks: Ranks, role: str, incarnation: str, port: int) -> RankProcess:
    direct = {"config": {"staging_bytes": 0}}  # equal ranks need no arena: they start sooner
    rank = RankProcess(role, 0, 1, incarnation, "DRAM", "", "tcp", pages=BIG, port=port, options=direct)
    ranks.all.append(rank)
    rank.card = RankCard.model_validate_json(rank.answer()["card"])
    return rank


def wire(*pair: RankProcess) -> None:
    for rank, other in (pair, pair[::-1]):
        rank.tell("peers", cards=[other.card.model_dump_json()])
    for rank in pair:
        wired = rank.answer()
        assert wired["wired"], wired


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_rank_restarted_in_place_is_a_new_peer_and_the_old_request_never_resumes(ranks, victim):
    ports = {"prefill": free_port(), "decode": free_port()}
    pair = {role: start(ranks, role, f"{role}-1", ports[role]) for role in ports}
    wire(pair["prefill"], pair["decode"])
    pair["decode"].ask("receive", room=1, first=0, count=BIG)
    pair["prefill"].ask("send", room=1, first=0, count=BIG, hold=True)  # its last chunk is never ready
    until = time.monotonic() + 20
    while pair["decode"].ask("wait", room=1, timeout=0)["state"] == "Waiting":
        assert time.monotonic() < until
    assert pair["decode"].ask("wait", room=1, timeout=0)["state"] == "Transferring"
    old = pair[victim]
    old.process.send_signal(signal.SIGKILL)
    old.process.wait(30)
    pair[victim] = start(ranks, victim, f"{victim}-2", ports[victim])
    assert pair[victim].card.control == old.card.control and pair[victim].card.pod_uid == old.card.pod_uid
    survivor = pair["decode" if victim == "prefill" else "prefill"]

    failed = survivor.ask("wait", room=1)
    assert failed["state"] == "Failed" and "room 1" in failed["error"], failed
    wire(pair["prefill"], pair["decode"])
    until = time.monotonic() + 60
    while survivor.ask("counters")["inflight"] or survivor.ask("counters")["quarantined_bytes"]:
        assert time.monotonic() < until, survivor.ask("counters")
        time.sleep(0.1)
    if victim == "prefill":
        survivor.ask("reuse")
        time.sleep(0.5)
        assert survivor.ask("check", room=1, pages=[], all=[])["untouched"]

    pair["decode"].ask("receive", room=2, pages=[7, 3])
    pair["prefill"].ask("send", room=2, pages=[1, 2])
    for rank in pair.values():
        done = rank.ask("wait", room=2)
        assert done["state"] == "Success", done
    assert pair["decode"].ask("check", room=2, pages=[7, 3])["holds"]
    for rank in pair.values():
        assert rank.ask("close") == {"closed": True}


def test_before_the_new_roster_comes_a_rank_in_the_same_place_is_refused_by_name(ranks):
    """Between the restart and the operator's next roster nothing of the old incarnation is taken for the new one."""
    port = free_port()
    prefill, decode = start(ranks, "prefill", "prefill-1", port), start(ranks, "decode", "decode-1", 0)
    wire(prefill, decode)
    prefill.process.kill()
    prefill.process.wait(30)
    again = start(ranks, "prefill", "prefill-2", port)
    assert again.card.control == prefill.card.control
    decode.ask("receive", room=1, pages=[3])
    failed = decode.ask("wait", room=1)
    assert failed["state"] == "Failed" and failed["kind"] in ("PeerReplaced", "PeerUnreachable"), failed
    until = time.monotonic() + 30
    while True:
        (verdict,) = decode.ask("verdicts")["verdicts"]
        if verdict["reason"] == "PeerReplaced":
            break
        assert time.monotonic() < until, verdict
        time.sleep(0.05)
    assert verdict["state"] == "Refused" and "prefill-2" in verdict["message"]
    wire(again, decode)
    decode.ask("receive", room=2, pages=[4])
    again.ask("send", room=2, pages=[1])
    assert decode.ask("wait", room=2)["state"] == "Success"
    assert decode.ask("check", room=2, pages=[4])["holds"]
