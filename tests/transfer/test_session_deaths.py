"""What counts as a source's death where it can't be looked up (the double's agents share one process): all evidence
together, for long enough. A firewall can make each piece of it."""

from __future__ import annotations

import time

from kv_world import Rank, ask, until

from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.deaths import Deaths

TIMES = Timeouts(waiting=20, transfer=20, settle=0.2, connect=1, probe=20, quarantine=600)
PATIENCE = 2 * 1 + 1.0
"""2 x connect + 1 s."""


def cut_control(prefill: Rank) -> None:
    """Its control connections are reset from its side and its port refuses, as a rejecting firewall would do."""
    wiring = prefill.endpoint._wiring
    prefill.endpoint._core.call(wiring.connections.close)
    prefill.endpoint._core.call(lambda: [p.channel.close() for p in wiring.known() if p.channel])


def begins(world, **config):
    (prefill,), (decode,) = world.pair(timeouts=TIMES, **config)
    receiver = ask(decode, 1, [4, 5])
    (peer,) = decode.endpoint._wiring.known()
    assert until(lambda: peer.channel is not None)  # there is one to be reset
    cut_control(prefill)
    assert until(lambda: peer.ended_there and peer.refused_since)
    assert receiver.wait(30) is TransferState.FAILED and not receiver.pages_releasable
    return prefill, decode, receiver


def test_a_reset_connection_and_a_refusing_port_are_no_death_while_the_data_path_lives(world):
    _, decode, receiver = begins(world)
    decode.endpoint.apply_peers([])
    time.sleep(PATIENCE + 1)
    assert not receiver.pages_releasable


def test_a_data_path_that_ended_too_is_no_death_of_a_rank_that_the_roster_names(world):
    prefill, _, receiver = begins(world)
    world.hub.disconnect(prefill.agent.name)
    time.sleep(PATIENCE + 1)
    assert not receiver.pages_releasable


def test_all_evidence_counts_once_it_has_held_for_long_enough(world):
    prefill, decode, receiver = begins(world)
    world.hub.disconnect(prefill.agent.name)
    began = time.monotonic()
    decode.endpoint.apply_peers([])  # the last piece
    assert until(lambda: receiver.pages_releasable)
    assert time.monotonic() - began > PATIENCE
    assert until(lambda: decode.endpoint.counters.get("quarantine_released{fence=source_end}") == 1)


def test_evidence_that_did_not_hold_begins_anew(world, monkeypatch):
    patience = [600.0]  # at first: it must not be over before the data path is back, however slow this machine is
    monkeypatch.setattr(Deaths, "patience", property(lambda self: patience[0]))
    prefill, decode, receiver = begins(world)
    agent = prefill.agent
    world.hub.disconnect(agent.name)
    decode.endpoint.apply_peers([])
    since = decode.endpoint._wiring._deaths._since
    assert until(lambda: since)
    first = min(since.values())
    time.sleep(0.5)
    back = time.monotonic()
    with world.hub.lock:  # the data path is back for a moment
        agent.alive, world.hub.agents[agent.name] = True, agent
    assert until(lambda: min(since.values(), default=0.0) > back)  # it was looked at
    assert first < back - 0.4
    world.hub.disconnect(agent.name)
    patience[0] = PATIENCE
    assert until(lambda: receiver.pages_releasable)
    assert time.monotonic() - back > PATIENCE  # counted from the first moment, it would be over half a second earlier
