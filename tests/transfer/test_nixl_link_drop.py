"""Fact 3 over a real link: cut in the middle of a transfer, both ends give up within their own deadlines, only that
peer's requests end, and the pages come back when the source has drained (NIXL itself would wait for ever)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from network import PREFILL, Network
from nixl_ranks import RankProcess

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of

pytestmark = pytest.mark.nixl
BIG = 40_000
"""Pages of 2 layers * (K 256 + V 512 bytes): 61 MB, over two seconds at 200 Mbit/s."""
TIMES = {"waiting": 100, "transfer": 8, "settle": 0.5, "connect": 8, "probe": 30}
"""`transfer` is the first to end what hangs; a small request beside it has so long too."""
DIRECT = {"config": {"staging_bytes": 0}, "timeouts": TIMES}
"""Equal ranks need no arena: they start sooner."""
NAMED = ("DeadlineExceeded", "PeerUnreachable", "AgentFailure")


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.remove()


@pytest.fixture
def trio(network, ranks) -> tuple[RankProcess, RankProcess, RankProcess]:
    """One prefill rank and two decode engines, each behind a link of its own."""
    prefill = RankProcess(
        *("prefill", 0, 1, "p-1", "DRAM", "", "tcp"),
        pages=BIG,
        host=PREFILL,
        devices=network.devices,
        namespace=network.hub,
        options=DIRECT,
    )
    decode = [
        RankProcess(
            *("decode", 0, 1, f"d-{i}", "DRAM", "", "tcp"),
            pages=BIG,
            host=network.address(i),
            devices="v",
            namespace=network.spokes[i],
            pod=f"decode-pod-{i}",
            options=DIRECT,
        )
        for i in range(2)
    ]
    ranks.all = [prefill, *decode]
    for rank in ranks.all:
        rank.card = RankCard.model_validate_json(rank.answer()["card"])
    cards = [rank.card for rank in ranks.all]
    for rank in ranks.all:
        rank.tell("peers", cards=[c.model_dump_json() for c in peers_of(rank.card, cards)])
    for rank in ranks.all:
        wired = rank.answer()
        assert wired["wired"], wired
    return prefill, decode[0], decode[1]


def small(prefill: RankProcess, decode: RankProcess, room: int, page: int) -> None:
    """A short request goes through."""
    decode.ask("receive", room=room, pages=[page])
    prefill.ask("send", room=room, pages=[BIG - 1])
    for rank in (prefill, decode):
        done = rank.ask("wait", room=room)
        assert done["state"] == "Success", done
    assert decode.ask("check", room=room, pages=[page])["holds"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["down", "black hole"])
def test_a_link_cut_in_mid_transfer_ends_that_peers_requests_in_time_and_no_others(network, trio, how):
    prefill, cut, other = trio
    cut.ask("receive", room=1, first=0, count=BIG - 10)
    prefill.ask("send", room=1, first=0, count=BIG - 10, hold=True)  # however slow this machine is: it is not over
    until = time.monotonic() + 20
    while cut.ask("wait", room=1, timeout=0)["state"] == "Waiting":
        assert time.monotonic() < until
    network.cut(0, how)
    assert cut.ask("wait", room=1, timeout=0)["state"] == "Transferring"

    small(prefill, other, 2, BIG - 1)  # while the first one hangs
    hangs = prefill.ask("wait", room=1, timeout=0)["state"] == "Transferring"
    assert hangs, "the other peer's request waited for the cut one"

    # 8 s of transfer, 0.5 s to settle; or 8 s without a pong. Slack for a slow machine, not for NIXL.
    sent, got = prefill.ask("wait", room=1, timeout=40), cut.ask("wait", room=1, timeout=40)
    for end in (sent, got):
        assert end["state"] == "Failed" and end["kind"] in NAMED and "room 1" in end["error"], end
    assert got["releasable"] is False and cut.ask("counters")["quarantined_bytes"] > 0
    small(prefill, other, 3, BIG - 2)

    network.mend(0, how)
    until = time.monotonic() + 60
    while not cut.ask("wait", room=1, timeout=0)["releasable"]:
        assert time.monotonic() < until, (cut.ask("counters"), prefill.ask("counters"))
        time.sleep(0.1)
    cut.ask("reuse")  # its pages are another request's now
    time.sleep(1)
    assert cut.ask("check", room=1, pages=[], all=[])["untouched"], "a byte landed after the pages were given back"
    until = time.monotonic() + 60
    while True:
        cut.ask("receive", room=4, pages=[7])
        prefill.ask("send", room=4, pages=[BIG - 1])
        if cut.ask("wait", room=4)["state"] == prefill.ask("wait", room=4)["state"] == "Success":
            break
        assert time.monotonic() < until, "the link is back, and requests are not"
        time.sleep(0.5)
    assert cut.ask("check", room=4, pages=[7])["holds"]
    for rank in trio:
        assert rank.ask("close") == {"closed": True}
