"""Real NIXL over TCP, a process killed in the middle of a large transfer, in both directions: the survivor
ends by name within its deadline, stays alive, and serves the next incarnation byte-exact."""

from __future__ import annotations

import signal
import time

import pytest
from nixl_ranks import RankProcess, Ranks, released_by

from pdtransfer.contract.card import RankCard

pytestmark = pytest.mark.nixl
BIG = 100_000
"""Pages of 2 layers * (K 256 + V 512 bytes): 154 MB, a quarter of a second and more over TCP."""
TIMES = {"waiting": 100, "transfer": 10, "settle": 0.5, "connect": 5, "probe": 30}
DEADLINE = 45
"""Seconds: transfer or twice connect, settle, and slack for a slow machine; far less than `waiting`."""


def wire(prefill: RankProcess, decode: RankProcess) -> None:
    for rank, other in ((prefill, decode), (decode, prefill)):
        rank.tell("peers", cards=[other.card.model_dump_json()])
    for rank in (prefill, decode):
        wired = rank.answer()
        assert wired["wired"], wired


def begin(prefill: RankProcess, decode: RankProcess, room: int) -> None:
    """A transfer of the whole pool that is surely under way: its last chunk is not ready."""
    decode.ask("receive", room=room, first=0, count=BIG)
    prefill.ask("send", room=room, first=0, count=BIG, hold=True)
    until = time.monotonic() + 20
    while decode.ask("wait", room=room, timeout=0)["state"] == "Waiting":
        assert time.monotonic() < until
    assert decode.ask("wait", room=room, timeout=0)["state"] == "Transferring"


def serves(prefill: RankProcess, decode: RankProcess, room: int) -> None:
    decode.ask("receive", room=room, pages=[7, 3])
    prefill.ask("send", room=room, pages=[1, 2])
    for rank in (prefill, decode):
        done = rank.ask("wait", room=room)
        assert done["state"] == "Success", done
    assert decode.ask("check", room=room, pages=[7, 3])["holds"]


def start(ranks: Ranks, role: str, incarnation: str) -> RankProcess:
    rank = RankProcess(role, 0, 1, incarnation, "DRAM", "", "tcp", pages=BIG, options={"timeouts": TIMES})
    ranks.all.append(rank)
    rank.card = RankCard.model_validate_json(rank.answer()["card"])
    return rank


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_process_killed_in_mid_transfer_costs_that_transfer_only(ranks, victim):
    pair = {role: start(ranks, role, f"{role}-1") for role in ("prefill", "decode")}
    wire(pair["prefill"], pair["decode"])
    begin(pair["prefill"], pair["decode"], 1)
    pair[victim].process.send_signal(signal.SIGKILL)
    pair[victim].process.wait(30)
    survivor = pair["decode" if victim == "prefill" else "prefill"]
    failed = survivor.ask("wait", room=1, timeout=DEADLINE)
    assert failed["state"] == "Failed", failed
    assert failed["kind"] in ("PeerUnreachable", "AgentFailure", "DeadlineExceeded"), failed
    assert "room 1" in failed["error"]

    pair[victim] = start(ranks, victim, f"{victim}-2")
    wire(pair["prefill"], pair["decode"])
    until = time.monotonic() + 60
    while survivor.ask("counters")["inflight"] or survivor.ask("counters")["quarantined_bytes"]:
        assert time.monotonic() < until, survivor.ask("counters")
        time.sleep(0.1)
    if victim == "prefill":
        assert released_by(survivor, "source_end")
    serves(pair["prefill"], pair["decode"], 2)
    assert survivor.ask("close") == {"closed": True}
