"""A bad card, peer or probe costs only itself: no crash of the endpoint, nothing leaked."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from kv_world import READY, TOKENS, ask, give, handled, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import ProbeOpen, Sample
from pdtransfer.session.scratch import SLOTS

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


BROKEN = {
    "no control address": {"control": ""},
    "a control address without port": {"control": "127.0.0.1:http"},
    "a port that is none": {"control": "127.0.0.1:99999"},
    "a host name that can not be one": {"control": "x" * 300 + ":1"},
    "metadata that is no base64": {"nixl_metadata": "caf\u00e9"},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_card_that_makes_no_sense_is_a_verdict_and_the_others_serve_on(world, what):
    (prefill,), (decode,) = world.pair()
    other = world.rank(Role.PREFILL, incarnation="prefill-x").endpoint.card
    bad = other.model_copy(update={"pod_uid": "bad-pod", "bootstrap": "127.0.0.1:1", **BROKEN[what]})
    decode.endpoint.apply_peers([prefill.endpoint.card, bad])
    assert until(lambda: len(decode.endpoint.verdicts) == 2)

    def judged() -> bool:
        found = {v.peer_pod_uid: v for v in decode.endpoint.verdicts}
        verdict = found["bad-pod"]
        return verdict.state in (VerdictState.REFUSED, VerdictState.UNREACHABLE) and bool(verdict.message)

    assert until(judged), decode.endpoint.verdicts
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS and decode.endpoint.failed is None


def test_metadata_of_another_agent_than_the_card_names_is_refused(world):
    (prefill,), (decode,) = world.pair()
    other = world.rank(Role.PREFILL, incarnation="prefill-x")
    bad = other.endpoint.card.model_copy(update={"pod_uid": "bad-pod", "agent_name": "somebody-else"})

    def broken(name: str) -> None:
        from pdtransfer.agent.port import AgentFailure

        raise AgentFailure("nixlUnknownError", "injected", posted=False)

    decode.agent.remove_peer = broken  # type: ignore[method-assign]
    decode.endpoint.apply_peers([prefill.endpoint.card, bad])
    assert until(lambda: any(v.reason == "AgentError" for v in decode.endpoint.verdicts))
    assert decode.endpoint.failed is None


@pytest.mark.parametrize("field", ["address", "item_bytes", "items", "device"])
def test_a_region_beyond_what_an_address_can_be_does_not_parse(world, field):
    card = world.rank(Role.PREFILL).endpoint.card.model_dump(mode="json")
    card["layout"]["regions"][0][field] = 1 << 70
    with pytest.raises(ValueError, match=field):
        RankCard.model_validate(card)


def test_an_unexpected_error_of_one_room_ends_that_room_only(world):
    (prefill,), (decode,) = world.pair()

    class Odd:
        def wait(self, timeout: float) -> bool:
            return True

    receiver = ask(decode, 1, [4])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([(1 << 40) - 1], 0, Odd())
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    import pdtransfer.session.feeder as feeder

    real = feeder.as_pages
    feeder.as_pages = lambda *a, **k: 1 / 0  # type: ignore[assignment]
    try:
        receiver = ask(decode, 2, [6])
        give(prefill, 2, [1])
        assert receiver.wait(30) is FAILED and "ZeroDivisionError" in str(receiver.error)
    finally:
        feeder.as_pages = real
    assert prefill.endpoint.failed is None
    receiver = ask(decode, 3, [7])
    give(prefill, 3, [1])
    assert receiver.wait(30) is SUCCESS


def test_a_peer_that_opens_many_probes_takes_no_more_than_its_share_of_scratch(world):
    (prefill,), (decode,) = world.pair()
    assert until(lambda: all(v.state is VerdictState.WIRED for v in prefill.endpoint.verdicts))
    (peer,) = decode.endpoint._wiring._peers.values()
    sample = Sample(region=0, page=0, nbytes=8)
    free = prefill.endpoint._wiring.prober.scratch._free
    assert until(lambda: len(free) == SLOTS)
    for seq in range(1000, 1000 + 3 * SLOTS):
        decode.endpoint._core.call(decode.endpoint._wiring.send, peer, ProbeOpen(seq=seq, samples=(sample,)))
    time.sleep(0.3)
    assert len(free) >= SLOTS - 2
    before = decode.endpoint.verdicts[0].at
    decode.endpoint.probe()
    assert until(lambda: decode.endpoint.verdicts[0].at > before)
    assert decode.endpoint.verdicts[0].state is VerdictState.WIRED


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_incarnations_leave_no_agent_thread_file_or_scratch_behind(world):
    decode = world.rank(Role.DECODE)

    def turn(i: int) -> None:
        prefill = world.rank(Role.PREFILL, incarnation=f"prefill-{i}")
        world.wire([prefill], [decode])
        receiver = ask(decode, i, [4])
        give(prefill, i, [1])
        assert receiver.wait(30) is SUCCESS
        (peer,) = decode.endpoint._wiring._peers.values()
        # It dies with a probe of its own open: scratch of decode is lent to it.
        sample = Sample(region=0, page=0, nbytes=8)
        lender = decode.endpoint._wiring.prober._lender
        decode.endpoint._core.call(lender.on_frame, peer, ProbeOpen(seq=7, samples=(sample,)))
        assert until(lambda: lender._lent)
        prefill.endpoint.close()
        world.ranks.remove(prefill)

    turn(0)
    files, threads = open_files(), threading.active_count()
    for i in range(1, SLOTS + 3):
        turn(i)
    decode.endpoint.apply_peers([])
    assert until(lambda: decode.agent.peers == set() and not decode.endpoint._wiring._retired)
    assert until(lambda: threading.active_count() <= threads)
    assert until(lambda: open_files() <= files + 2), (files, open_files())
    assert until(lambda: len(decode.endpoint._wiring.prober.scratch._free) == SLOTS)
    assert until(lambda: len(decode.endpoint._core._tasks) < 5)


def test_a_send_whose_handle_errored_is_forgotten_once_its_decode_is_gone(world):
    (prefill,), (decode,) = world.pair()
    prefill.agent.faults.error.add(prefill.agent.posts + 1)
    ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert sender.wait(30) is FAILED
    assert prefill.endpoint.inflight == 1  # it may still land: the prefill pod is not drained yet
    world.hub.disconnect(decode.agent.name)
    decode.endpoint.close()
    prefill.endpoint.apply_peers([])
    assert until(lambda: prefill.endpoint.inflight == 0)


def test_a_drain_never_acknowledges_a_handle_that_errored(world):
    """Also when the decode left the roster meanwhile and came back."""
    quick = Timeouts(waiting=20, transfer=20, settle=0.1, connect=5, probe=20)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    prefill.agent.faults.error.add(prefill.agent.posts + 1)
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert receiver.wait(30) is FAILED
    prefill.endpoint.apply_peers([])
    handled(prefill)
    assert until(lambda: not prefill.endpoint._wiring.peers and not prefill.endpoint._wiring._retired)
    prefill.endpoint._core.call(prefill.endpoint._source.askers._tombs.expire, time.monotonic() + 1000)
    handled(prefill)
    prefill.endpoint.apply_peers([decode.endpoint.card])
    assert until(lambda: prefill.endpoint.verdicts and prefill.endpoint.verdicts[0].state is VerdictState.WIRED)
    time.sleep(0.3)
    assert not receiver.pages_releasable
    assert world.hub.unstall(prefill.agent.name) > 0
    assert READY.wait(0)


def test_a_connection_that_this_side_gave_up_is_no_sign_of_death(world):
    quick = Timeouts(waiting=20, transfer=20, settle=0.2, connect=1, probe=20)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    (peer,) = decode.endpoint._wiring._peers.values()
    assert until(lambda: peer.channel is not None)
    channel = peer.channel
    # The source says nothing any more (a stopped process, a cut link), but lives.
    silent, goes_on = threading.Event(), threading.Event()
    prefill.endpoint._core.call(lambda: (silent.set(), goes_on.wait(60)))
    assert silent.wait(30)
    try:
        # It can not end the connection, nor make a new one, so this side did.
        assert until(lambda: peer.channel is None, 30)
        handled(decode)
        assert channel.closed_here and not peer.ended_there
    finally:
        goes_on.set()


def test_a_reload_that_fails_is_tried_again(world):
    from pdtransfer.agent.port import AgentFailure

    (prefill,), (decode,) = world.pair()
    real, fails = prefill.agent.add_peer, [1, 1]

    def shaky(metadata: bytes) -> str:
        if fails:
            fails.pop()
            raise AgentFailure("nixlBackendError", "injected", posted=False)
        return real(metadata)

    prefill.agent.add_peer = shaky  # type: ignore[method-assign]
    prefill.agent.remove_peer(decode.agent.name)
    ask(decode, 1, [4])
    assert give(prefill, 1, [1]).wait(30) is FAILED
    assert until(lambda: not fails)
    assert until(lambda: prefill.endpoint.verdicts[0].state is VerdictState.WIRED)
    receiver = ask(decode, 2, [6])
    give(prefill, 2, [1])
    assert receiver.wait(30) is SUCCESS
