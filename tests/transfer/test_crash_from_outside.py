"""What an engine ends from outside: a rank whose own thread may hang, so that only another one can say so."""

from __future__ import annotations

import threading

import pytest
from kv_world import World, ask, give, until

from pdtransfer.session.api import TransferState

WORD = "a thread of the engine died"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_crash_from_outside_ends_every_transfer_and_the_agent(world: World, side: str) -> None:
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1], finish=False)
    rank, mine = (prefill, sender) if side == "prefill" else (decode, receiver)

    rank.endpoint.crash(WORD)

    assert WORD in str(rank.endpoint.failed)  # at once
    assert sender.wait(20) is TransferState.FAILED and receiver.wait(20) is TransferState.FAILED
    assert WORD in str(mine.error)
    assert until(lambda: not rank.agent.alive)


def test_a_thread_that_hangs_grows_old_and_its_crash_shows_all_the_same(world: World) -> None:
    _, (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    hangs, goes_on = threading.Event(), threading.Event()

    def progress() -> list[tuple[str, bytes]]:
        hangs.set()
        goes_on.wait()
        return []

    decode.agent.progress = progress  # type: ignore[method-assign]
    try:
        assert hangs.wait(20)
        before = decode.endpoint.age
        assert until(lambda: decode.endpoint.age > before + 0.2)  # only a thread that does not turn gets there
        decode.endpoint.crash(WORD)
        assert WORD in str(decode.endpoint.failed)
        assert not receiver.pages_releasable  # the call that hangs may still write
        with pytest.raises(Exception, match=WORD):
            ask(decode, 2, [5])
    finally:
        goes_on.set()
    assert receiver.wait(20) is TransferState.FAILED
