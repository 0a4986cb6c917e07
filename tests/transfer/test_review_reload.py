"""A data connection that NIXL lost is made anew also while requests keep coming."""

from __future__ import annotations

import base64
import threading
import time

from kv_world import TOKENS, World, ask, give, until

from pdtransfer.agent.port import AgentFailure
from pdtransfer.session.api import TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


def test_a_lost_data_connection_is_made_anew_under_steady_load(world: World):
    (prefill,), (decode,) = world.pair()
    agent, name = prefill.agent, decode.endpoint.card.agent_name
    real, loads, broken = agent.post, agent._loads[name], []

    def post(*args, **more):
        if args[3].owner == name and agent._loads[name] == loads:  # as NIXL: only remove and add mend it
            broken.append(name)
            raise AgentFailure("nixlRemoteDisconnectError", f"{name} is disconnected", posted=False)
        return real(*args, **more)

    agent.post = post
    outcomes, open_rooms = [], []
    end = time.monotonic() + 20.0
    for room in range(1, 1000):
        # A room is always open and waits for its chunk while the one before it is being written.
        open_rooms.append((room, ask(decode, room, [room % 30]), prefill.endpoint.send(room=room, tokens=TOKENS - 1)))
        time.sleep(0.05)
        if len(open_rooms) < 2:
            continue
        number, receiver, sender = open_rooms.pop(0)
        prefill.pool.fill(number, [3])
        sender.chunk([3], 0, type("Ready", (), {"wait": lambda self, timeout: True})())
        sender.finish(b"")
        outcomes.append(receiver.wait(30))
        assert sender.wait(30) in (SUCCESS, FAILED)
        assert until(lambda receiver=receiver: receiver.pages_releasable)
        if outcomes[-1] is SUCCESS or time.monotonic() > end:
            break
    assert broken and outcomes[0] is FAILED  # the fault happened
    assert outcomes[-1] is SUCCESS, f"{len(outcomes)} requests failed one after the other"
    for _, receiver, sender in open_rooms:
        sender.abort("the test ends")
        receiver.abort("the test ends")
    assert until(lambda: decode.endpoint.inflight == 0)
    again = ask(decode, 2000, [31])
    give(prefill, 2000, [4])
    assert again.wait(30) is SUCCESS


def test_a_rank_whose_connection_was_lost_is_served_at_once_when_it_takes_a_new_agent(world: World):
    (prefill,), _ = world.pair()
    wiring = prefill.endpoint._wiring
    (peer,) = wiring.peers.values()
    later = world.hub.agent(f"{peer.card.agent_name}.1")
    metadata = base64.b64encode(later.metadata()).decode()
    card = peer.card.model_copy(update={"agent_name": later.name, "generation": 1, "nixl_metadata": metadata}).sealed()
    seen: list[bool] = []
    done = threading.Event()

    def move() -> None:
        peer.broken = peer.reload = True
        wiring._moves.adopt(peer, card)
        seen.extend((peer.broken, peer.reload, peer.loaded))
        done.set()

    prefill.endpoint._core.call(move)
    assert done.wait(30) and seen == [False, False, True]
