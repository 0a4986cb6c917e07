"""Requests that come while their peer is still being loaded."""

from __future__ import annotations

import threading

import pytest
from kv_world import ask, give, until

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import Role
from pdtransfer.errors import PeerNotRostered
from pdtransfer.session.api import TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


def test_a_request_that_comes_before_its_peer_is_loaded_waits_for_it(world):
    """The roster names it, so the request is good; it was failed with "the roster changed"."""
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    load, asked = decode.agent.add_peer, threading.Event()
    decode.agent.add_peer = lambda metadata: (asked.wait(30), load(metadata))[1]
    world.wire([prefill], [decode], wait=False)
    receiver = ask(decode, 1, [4])
    asked.set()
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS and decode.pool.holds(1, [4])


def test_a_request_that_comes_before_its_peer_is_refused_fails_by_the_reason(world):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    turned = threading.Event()

    def refuses(metadata):
        turned.wait(30)
        raise AgentFailure("nixlInvalidParamError", "injected: odd metadata", posted=False)

    decode.agent.add_peer = refuses
    world.wire([prefill], [decode], wait=False)
    receiver = ask(decode, 1, [4])
    turned.set()
    assert receiver.wait(30) is FAILED and "odd metadata" in str(receiver.error)
    assert until(lambda: receiver.pages_releasable)


def test_a_request_that_comes_while_a_roster_is_applied_never_finds_a_peer_that_is_not_there_yet(world):
    """It is refused by name, to be asked again, and not failed with "the roster changed"."""
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    core, apply = decode.endpoint._core, decode.endpoint._wiring.apply
    real, asked = core.call, []

    def call(action, *args):
        if action == apply:
            with pytest.raises(PeerNotRostered):
                ask(decode, 1, [4])
            asked.append(args)
        real(action, *args)

    core.call = call
    world.wire([prefill], [decode], wait=False)
    core.call = real
    assert len(asked) == 1
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS
