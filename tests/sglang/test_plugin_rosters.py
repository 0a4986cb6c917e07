"""Under an operator: ranks show their cards to a sidecar, rosters name the peers, and nobody else is spoken to."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from free_ports import free_port
from pdtransfer.contract.base import Role
from pdtransfer.engines.sglang.messages import Introduce, encode
from pdtransfer.engines.sglang.receiver import PdclusterKVReceiver
from tests.sglang.plugin_request import Request
from tests.sglang.plugin_sidecar import Sidecar, shown, wired
from tests.sglang.plugin_world import World, wait_for, world


def test_peers_are_wired_before_the_first_request(site: tuple[World, Sidecar]) -> None:
    here, sidecar = site
    prefill, decode = here.engine(tp=2), here.engine(role="decode", port=1)
    sidecar.roster(shown(sidecar, 3))
    wired(prefill, decode)
    assert {c.engine.type.value for c in sidecar.cards.values()} == {"SGLang"}
    request = Request(1, prefill, decode, prompt=3)
    request.run()
    assert request.wrong() == []


def test_a_peer_outside_the_roster_is_refused_by_name(site: tuple[World, Sidecar]) -> None:
    here, sidecar = site
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    shown(sidecar, 2)
    request = Request(2, prefill, decode, prompt=2)
    request.begin()
    assert request.receivers[0].poll() == KVPoll.Failed
    reason = request.reason(request.receivers[0])
    assert "PeerNotRostered" in reason and prefill.address in reason


def test_a_refusal_ends_with_the_roster_that_names_the_peer(site: tuple[World, Sidecar]) -> None:
    here, sidecar = site
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    cards = shown(sidecar, 2)
    first = Request(6, prefill, decode, prompt=2)
    first.begin()
    assert first.receivers[0].poll() == KVPoll.Failed
    for one in (*first.senders, *first.receivers):
        one.clear()
    sidecar.roster(cards)
    wired(prefill, decode)
    second = Request(7, prefill, decode, prompt=2)
    second.run()
    assert second.wrong() == []


def test_a_prefill_whose_roster_does_not_name_decode_is_quoted(site: tuple[World, Sidecar]) -> None:
    """Rosters reach the two sides one after the other; a request that came between them says why it failed."""
    here, sidecar = site
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    sidecar.roster(shown(sidecar, 2), to=Role.DECODE)
    core = decode.managers[0].rank.endpoint._core
    core.timeouts = replace(core.timeouts, connect=1.0)
    wait_for(lambda: decode.managers[0].rank.peers, "decode's roster")
    request = Request(8, prefill, decode, prompt=2).begin()
    request.ask()
    wait_for(lambda: request.receivers[0].poll() == KVPoll.Failed, "the refusal")
    assert "PeerNotRostered: the peer's roster does not name this rank" in request.reason(request.receivers[0])


def test_an_unrostered_address_is_not_even_connected_to(site: tuple[World, Sidecar]) -> None:
    here, sidecar = site
    decode = here.engine(role="decode", port=1)
    shown(sidecar, 1)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as trap:
        trap.settimeout(0.0)
        (manager,) = decode.managers
        one = PdclusterKVReceiver(manager, f"127.0.0.1:{port}", 3)
        manager.try_ensure_parallel_info(one.bootstrap_addr)
        wait_for(lambda: manager.try_ensure_parallel_info(one.bootstrap_addr) or one.poll() == KVPoll.Failed, "an end")
        assert one.poll() == KVPoll.Failed
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_an_introduction_over_zmq_changes_nothing_under_a_roster(site: tuple[World, Sidecar]) -> None:
    here, sidecar = site
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    sidecar.roster(shown(sidecar, 2))
    wired(prefill, decode)
    (manager,) = prefill.managers
    before = manager.rank.peers
    stranger = decode.managers[0].rank.card.model_copy(update={"pod_uid": "stranger"})
    manager.hear(encode(Introduce(card=stranger)))
    assert manager.rank.peers == before


def test_a_roster_without_a_prefill_forgets_it_and_the_next_request_is_refused(site: tuple[World, Sidecar]) -> None:
    here, sidecar = site
    prefill, decode = here.engine(), here.engine(role="decode", port=1)
    sidecar.roster(shown(sidecar, 2))
    wired(prefill, decode)
    first = Request(4, prefill, decode, prompt=2)
    first.run()
    first.clear()
    (manager,) = decode.managers
    assert prefill.address in manager.prefill_info_table
    sidecar.roster([])
    wait_for(lambda: not manager.rank.peers, "the empty roster")
    wait_for(lambda: prefill.address not in manager.prefill_info_table, "what was cached about it to go")
    second = Request(5, prefill, decode, prompt=2)
    second.begin()
    assert second.receivers[0].poll() == KVPoll.Failed
    assert "PeerNotRostered" in second.reason(second.receivers[0])


def test_an_unhealthy_engine_stays_for_the_operator_to_see(site: tuple[World, Sidecar]) -> None:
    """Its card is withdrawn, and it says why for as long as it lives; the operator acts."""
    here, sidecar = site
    decode = here.engine(role="decode", port=1)
    shown(sidecar, 1)
    (manager,) = decode.managers
    manager.rank.endpoint._core.crash(RuntimeError("a fault"))
    wait_for(lambda: manager.rank._link.error, "the link's word")
    assert "its card is withdrawn" in manager.rank._link.error
    wait_for(lambda: sidecar.failed, "the rank's own word")
    told = sidecar.failed[0]
    assert told.incarnation == shown(sidecar, 1)[0].incarnation and "a fault" in told.message
    assert here.kills == []
    assert "a fault" in manager.problem


def test_a_pod_is_called_by_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers name the pod's IP; SGLang may find another one of its addresses."""
    with world(monkeypatch, {"POD_IP": "127.0.0.2", "POD_UID": "pod-1"}) as here:
        card = here.engine().managers[0].rank.card
        assert card.pod_uid == "pod-1"
        assert card.bootstrap.startswith("127.0.0.2:") and card.control.startswith("127.0.0.2:")
