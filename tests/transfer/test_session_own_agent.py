"""A rank tells whose fault a failed post is: its own agent's, which ends it, or a peer's, which does not."""

from __future__ import annotations

import time

from kv_world import ask, give, until

from pdtransfer.agent.port import AgentFailure
from pdtransfer.session.api import TransferState

FAILED = TransferState.FAILED


def breaks(agent, *, also_itself: bool) -> None:
    """Every post fails; `also_itself`: those within the rank too."""
    post = agent.post

    def fails(operation, local, local_indices, remote, remote_indices, notification=b""):
        if remote.owner != agent.name or also_itself:
            agent.faults.seen.append("broken")
            raise AgentFailure("nixlBackendError", "injected: broken", posted=False)
        return post(operation, local, local_indices, remote, remote_indices, notification)

    agent.post = fails


def test_a_rank_whose_own_agent_moves_nothing_any_more_fails_by_name(world):
    (prefill,), (decode,) = world.pair()
    breaks(prefill.agent, also_itself=True)
    for room in range(1, 4):
        receiver = ask(decode, room, [room])
        give(prefill, room, [1])
        assert receiver.wait(30) is FAILED
    assert until(lambda: prefill.endpoint.failed is not None)
    assert "not even from this rank to itself" in str(prefill.endpoint.failed)


def test_a_rank_whose_peers_fail_it_lives_on(world):
    (prefill,), (decode,) = world.pair()
    breaks(prefill.agent, also_itself=False)
    posts = len(prefill.agent.handles)
    for room in range(1, 6):
        receiver = ask(decode, room, [room])
        give(prefill, room, [1])
        assert receiver.wait(30) is FAILED
    assert until(lambda: len(prefill.agent.handles) > posts)  # the copy within the rank
    time.sleep(0.1)
    assert prefill.endpoint.failed is None


def test_a_rank_that_refuses_one_copy_within_itself_lives_on(world):
    """One refusal is a hiccup (three posts to peers in a row may be too): what is tried again works."""
    (prefill,), (decode,) = world.pair()
    post, refused = prefill.agent.post, []

    def fails(operation, local, local_indices, remote, remote_indices, notification=b""):
        within = remote.owner == prefill.agent.name
        if not within or len(refused) < 2:
            refused.extend([1] * within)
            raise AgentFailure("nixlBackendError", "injected: refused", posted=False)
        return post(operation, local, local_indices, remote, remote_indices, notification)

    prefill.agent.post = fails
    posts = len(prefill.agent.handles)
    for room in range(1, 4):
        receiver = ask(decode, room, [room])
        give(prefill, room, [1])
        assert receiver.wait(30) is FAILED
    assert until(lambda: len(prefill.agent.handles) > posts)
    time.sleep(0.1)
    assert len(refused) == 2 and prefill.endpoint.failed is None
