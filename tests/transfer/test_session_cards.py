"""What a card or a roster has to say before anything moves, and the verdicts about it."""

from __future__ import annotations

import pytest
from kv_world import ask, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.layout import HeadSlice
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import (
    PeerNotRostered,
    PeerUnreachable,
)
from pdtransfer.session.api import TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


def test_an_unrostered_bootstrap_is_refused_at_once(world):
    _, (decode,) = world.pair()
    with pytest.raises(PeerNotRostered):
        decode.endpoint.receive(room=1, attempt=0, bootstrap="10.0.0.1:1", pages=[1], tokens=1)


def test_a_missing_prefill_rank_is_refused_at_once(world):
    prefill, (decode,) = world.pair(2, 1)
    decode.endpoint.apply_peers([prefill[0].endpoint.card])
    with pytest.raises(PeerNotRostered, match="2 of 4 KV heads"):
        ask(decode, 1, [1])


def test_corrupted_bytes_are_never_wired(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    prefill.agent.faults.corrupt = decode.agent.faults.corrupt = True
    prefill.endpoint.apply_peers([decode.endpoint.card])
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].state is VerdictState.REFUSED)
    assert decode.endpoint.verdicts[0].reason == "ChecksumMismatch"
    assert decode.agent.faults.seen
    with pytest.raises(PeerUnreachable, match="ChecksumMismatch"):
        ask(decode, 1, [1])


def broken_cards(good):
    layout = good.layout
    other = good.model.model_copy(update={"revision": "other"})
    regions = tuple(r.model_copy(update={"memory": None}) for r in layout.regions)
    return {
        "BrokenSeal": good.model_copy(update={"layout_hash": "0" * 32}),
        "FingerprintMismatch": good.model_copy(update={"model": other}).sealed(),
        "StaleRegistration": good.model_copy(
            update={"layout": layout.model_copy(update={"regions": regions})}
        ).sealed(),
        "OtherCluster": good.model_copy(update={"cluster_uid": "other"}),
        "WrongRole": good.model_copy(update={"role": Role.DECODE}),
        "LayoutMismatch": good.model_copy(
            update={"layout": layout.model_copy(update={"heads": HeadSlice(first=0, count=4, total=8)})}
        ).sealed(),
        "AgentError": good.model_copy(update={"nixl_metadata": "bm90IG1ldGFkYXRh"}).sealed(),
    }


@pytest.mark.parametrize(
    "reason",
    [
        "BrokenSeal",
        "FingerprintMismatch",
        "StaleRegistration",
        "OtherCluster",
        "WrongRole",
        "LayoutMismatch",
        "AgentError",
    ],
)
def test_a_card_that_can_not_be_wired_is_refused_by_name(world, reason):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    decode.endpoint.apply_peers([broken_cards(prefill.endpoint.card)[reason]])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].state is not VerdictState.PROBING)
    (verdict,) = decode.endpoint.verdicts
    assert (verdict.state, verdict.reason) == (VerdictState.REFUSED, reason), verdict.message
    assert not decode.agent.handles


def test_a_peer_whose_roster_does_not_name_us_is_not_wired_until_it_does(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].reason == "PeerNotRostered")
    assert prefill.endpoint.counters["connections_refused"] >= 1
    prefill.endpoint.apply_peers([decode.endpoint.card])
    assert decode.endpoint.wait_wired(20)


def test_a_control_port_that_nobody_listens_on_is_unreachable(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    prefill.endpoint.close()
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert until(lambda: decode.endpoint.verdicts and decode.endpoint.verdicts[0].state is VerdictState.UNREACHABLE)


def test_verdicts_carry_the_proof_and_a_new_probe_renews_it(world):
    _, (decode,) = world.pair()
    (verdict,) = decode.endpoint.verdicts
    # 4 regions (2 layers x K, V), first and last page each, and the 64 KiB block:
    # K pages 4*4*8*2 = 256 bytes, V pages 512; 2 * (2 * 256 + 2 * 512) + 1 MiB.
    assert verdict.bytes_moved == 2 * (2 * 256 + 2 * 512) + 1048576
    assert verdict.checksum_ok and verdict.seconds > 0 and verdict.bandwidth > 0
    assert verdict.transport in ("TCP or shared memory", "RDMA")
    decode.endpoint.probe()
    assert until(lambda: decode.endpoint.verdicts[0].at > verdict.at)
