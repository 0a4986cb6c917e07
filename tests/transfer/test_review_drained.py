"""What prefill answers about a decode rank's memory: nothing of it is drained, and no abort is acknowledged, while a
handle flies to it or one that errored may still land, whoever remembers that handle."""

from __future__ import annotations

import time

import pytest
from kv_world import Rank, World, ask, give, handled, until

from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import Abort

FAILED = TransferState.FAILED
QUICK = Timeouts(waiting=30, transfer=30, settle=0.1, connect=30, probe=30)


def drained(prefill: Rank, decode: Rank) -> bool:
    """What prefill says when decode dials it again, in its own thread."""
    said: list[bool] = []
    source, agent = prefill.endpoint._source, decode.endpoint.card.agent_name
    prefill.endpoint._core.call(lambda: said.append(source.drained(agent)))
    handled(prefill)
    return said[0]


def settled_late(prefill: Rank) -> bool:
    """The deadline of a job's handles to settle has passed."""
    return bool(prefill.endpoint._source._rooms.draining)


def test_an_agent_is_not_drained_while_a_handle_flies_to_it(world: World) -> None:
    (prefill,), (decode,) = world.pair(timeouts=QUICK)
    assert drained(prefill, decode)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: prefill.agent.faults.seen)
    assert not drained(prefill, decode)
    receiver.abort("retracted")
    assert receiver.wait(30) is FAILED
    assert until(lambda: settled_late(prefill))
    assert not drained(prefill, decode) and not receiver.pages_releasable
    assert world.hub.unstall(prefill.agent.name) > 0
    prefill.agent.faults.stall_all = False
    assert until(lambda: drained(prefill, decode)) and until(lambda: receiver.pages_releasable)


@pytest.mark.parametrize("late", [False, True], ids=["while the job runs", "after its settle deadline"])
def test_an_agent_is_never_drained_again_once_a_handle_to_it_errored(world: World, late: bool) -> None:
    (prefill,), (decode,) = world.pair(timeouts=QUICK)
    prefill.agent.faults.stall_all = True
    receiver = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert until(lambda: prefill.agent.faults.seen)
    (leg,) = (leg for room in prefill.endpoint._source._rooms.open.values() for leg in room.legs.values())
    identity = leg.request.identity
    if late:
        receiver.abort("retracted")
        assert until(lambda: settled_late(prefill))
    for handle in prefill.agent.handles:
        handle.broken = handle.stalled
    assert until(lambda: any(note.startswith("error") for note in prefill.agent.faults.seen))
    assert receiver.wait(30) is FAILED
    assert until(lambda: not prefill.endpoint._core.mover.peers)  # nothing flies any more
    assert not drained(prefill, decode)
    # Prefill lets the rank go, forgets what it answered, and takes it up again.
    prefill.endpoint.apply_peers([])
    handled(prefill)
    assert until(lambda: not prefill.endpoint._wiring.peers and not prefill.endpoint._wiring._retired)
    askers = prefill.endpoint._source.askers
    prefill.endpoint._core.call(askers._tombs.expire, time.monotonic() + 1000)
    assert not drained(prefill, decode)
    prefill.endpoint.apply_peers([decode.endpoint.card])
    assert until(lambda: prefill.endpoint.verdicts and prefill.endpoint.verdicts[0].state is VerdictState.WIRED)
    # Decode says the abort again: it must stay unanswered.
    (peer,) = prefill.endpoint._wiring.peers.values()
    prefill.endpoint._core.call(askers.on_abort, peer, Abort(**leg.request.ids, reason="again"))
    handled(prefill)
    assert askers._tombs.get(peer.key, identity) is None and not receiver.pages_releasable
