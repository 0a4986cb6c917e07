"""Peers whose data path is dead cost the others neither their wiring nor their lives."""

from __future__ import annotations

import time

import pytest
from kv_world import World, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session import scratch_moves, wiring
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.scratch import SLOTS

SLOW = Timeouts(waiting=20.0, transfer=20.0, settle=0.3, connect=5.0, probe=1.0)


def test_probes_that_hang_do_not_keep_a_healthy_peer_from_being_wired(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wiring, "REPROBE", 0.05)
    decode = world.rank(Role.DECODE, timeouts=SLOW)
    bad = [
        world.rank(Role.PREFILL, timeouts=SLOW, card=lambda c, i=i: c.model_copy(update={"pod_uid": f"bad-{i}"}))
        for i in range(6)
    ]
    names = {r.endpoint.card.agent_name for r in bad}
    real, stalled = decode.agent.post, []

    def post(*args, **more):
        handle = real(*args, **more)
        if args[3].owner in names:  # the control channel works, the data path drops everything
            handle.stalled = True
            stalled.append(args[3].owner)
        return handle

    decode.agent.post = post
    for rank in bad:
        rank.endpoint.apply_peers([decode.endpoint.card])
    decode.endpoint.apply_peers([r.endpoint.card for r in bad])
    gone = [VerdictState.UNREACHABLE] * len(bad)
    assert until(lambda: set(stalled) == names and [v.state for v in decode.endpoint.verdicts] == gone)
    good = world.rank(Role.PREFILL, timeouts=SLOW)
    good.endpoint.apply_peers([decode.endpoint.card])
    decode.endpoint.apply_peers([r.endpoint.card for r in (*bad, good)])

    def wired() -> bool:
        return any(v.peer_pod_uid == "prefill-pod" and v.state is VerdictState.WIRED for v in decode.endpoint.verdicts)

    assert until(wired)
    time.sleep(0.5)  # the others would be probed again
    assert len(stalled) == len(names)  # not while their bytes are on their way: each holds one slot, no more
    moves, scratch = decode.endpoint._wiring.prober._moves, decode.endpoint._wiring.prober.scratch
    # (A probe of the good peer may have been too slow for its deadline, and its slot come back later.)
    assert until(lambda: len(moves._left) == len(names) and len(scratch._free) == SLOTS - len(names))
    decode.agent.post = real  # the path heals
    world.hub.unstall(decode.agent.name)
    assert decode.endpoint.wait_wired(20)
    assert until(lambda: len(scratch._free) == SLOTS)


def test_scratch_of_a_probe_that_errored_is_used_again_some_time_later(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch_moves, "REST", 0.2)
    decode, prefill = world.rank(Role.DECODE), world.rank(Role.PREFILL)
    decode.agent.spares = None  # these faults are for probes
    decode.agent.faults.error |= {1, 2, 3}
    world.wire([prefill], [decode])
    assert len([word for word in decode.agent.faults.seen if word.startswith("error")]) == 3
    time.sleep(0.3)
    scratch = decode.endpoint._wiring.prober.scratch
    decode.endpoint.probe()
    assert until(lambda: len(scratch._free) == SLOTS), len(scratch._free)


def test_whatever_goes_wrong_with_a_peers_lists_ends_no_endpoint(world: World):
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    real, broken = prefill.agent.prepare, []

    def prepare(peer, descriptors, kind):
        if not broken and peer is not None and descriptors.shape[1] == 5:
            broken.append(peer)
            raise RuntimeError("no error class of NIXL's")
        return real(peer, descriptors, kind)

    prefill.agent.prepare = prepare
    world.wire([prefill], [decode])
    assert broken and prefill.endpoint.failed is None
    receiver = ask(decode, 1, [1, 2])
    give(prefill, 1, [3, 4])
    assert receiver.wait(30) is TransferState.SUCCESS, receiver.error
