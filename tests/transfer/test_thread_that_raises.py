"""Whatever raises in the endpoint's thread: its rooms fail with the reason, the failure shows, nothing hangs.

Each place where the thread runs code is made to raise once while a receive and a send are under way. Either
the endpoint fails (its own parts broke), or what broke is one peer's or one room's and the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from kv_world import READY, TOKENS, Rank, World, ask, give, until

from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import TransferState

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED
WORD = "injected: a bug"


def boom(*_: object, **__: object) -> None:
    raise ZeroDivisionError(WORD)


async def aboom(*_: object, **__: object) -> None:
    raise ZeroDivisionError(WORD)


def again(rank: Rank) -> None:
    """A roster with one peer more: it has to be loaded."""
    (peer,) = rank.endpoint._wiring.peers.values()
    other = peer.card.model_copy(update={"pod_uid": "one-more"}).sealed()
    rank.endpoint.apply_peers([peer.card, other])


def tick(rank: Rank) -> None:
    rank.endpoint._core.ticks.append(boom)


def work(rank: Rank) -> None:
    rank.endpoint._core.works.append(boom)


def step(rank: Rank) -> None:
    rank.endpoint._core.mover.step = boom  # type: ignore[method-assign]


def progress(rank: Rank) -> None:
    rank.agent.progress = boom  # type: ignore[assignment, method-assign]


def callback(rank: Rank) -> None:
    rank.endpoint._core.call(boom)


def task(rank: Rank) -> None:
    rank.endpoint._core.call(lambda: rank.endpoint._core.spawn(aboom(), "a task"))


def loader(rank: Rank) -> None:
    rank.endpoint._wiring.loader._done = boom  # type: ignore[assignment]
    again(rank)


def loaders_rest(rank: Rank) -> None:
    rank.endpoint._wiring.loader._rest = aboom  # type: ignore[method-assign]
    again(rank)


def base_exception(rank: Rank) -> None:
    """As a library that calls sys.exit."""

    def leave() -> None:
        raise SystemExit(WORD)

    rank.endpoint._core.call(leave)


FATAL = [tick, work, step, progress, callback, task, loader, loaders_rest, base_exception]


@pytest.mark.parametrize("breaks", FATAL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_rooms_fail_with_the_reason_the_endpoint_says_so_and_the_other_side_ends_too(
    world: World, side: str, breaks: Callable[[Rank], None]
) -> None:
    (prefill,), (decode,) = world.pair()
    assert until(lambda: prefill.endpoint.verdicts[0].state is VerdictState.WIRED)
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1], finish=False)  # goes on until something ends it
    assert until(lambda: receiver.state is TransferState.TRANSFERRING)
    broken, other = (prefill, decode) if side == "prefill" else (decode, prefill)
    told = threading.Event()
    broken.endpoint.on_change(told.set)

    breaks(broken)

    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    mine = sender if side == "prefill" else receiver
    assert WORD in str(mine.error) and WORD in str(broken.endpoint.failed)
    assert told.wait(30)
    with pytest.raises(Exception, match=WORD):
        broken.endpoint.send(room=9, tokens=1) if side == "prefill" else ask(broken, 9, [9])
    assert until(lambda: not broken.endpoint._core._thread.is_alive())
    assert not broken.agent.alive  # destroyed, and with it what could still be written into this rank
    assert other.endpoint.failed is None
    assert until(lambda: other.endpoint.verdicts[0].state is VerdictState.UNREACHABLE)


def on_frame(prefill: Rank, decode: Rank) -> None:
    """Once: the connection ends, and is made again."""
    hooks = prefill.endpoint._wiring.hooks
    real = hooks.on_frame
    calls = [boom]
    hooks.on_frame = lambda *a: (calls.pop() if calls else real)(*a)  # type: ignore[method-assign]


def listener(prefill: Rank, decode: Rank) -> None:
    prefill.endpoint.on_change(boom)


def probe(prefill: Rank, decode: Rank) -> None:
    prober = prefill.endpoint._wiring.prober
    real = prober.probe

    async def once(*args: object) -> object:
        prober.probe = real  # type: ignore[method-assign]
        return boom()

    prober.probe = once  # type: ignore[assignment, method-assign]
    prefill.endpoint.probe()


def lend(prefill: Rank, decode: Rank) -> None:
    prefill.endpoint._wiring.prober._lender._hash = aboom  # type: ignore[assignment, method-assign]
    decode.endpoint.probe()


def add_peer(prefill: Rank, decode: Rank) -> None:
    prefill.agent.add_peer = boom  # type: ignore[assignment, method-assign]
    again(prefill)


def refusal(prefill: Rank, decode: Rank) -> None:
    prefill.endpoint._wiring.loader._refusal = boom  # type: ignore[assignment]
    again(prefill)


@pytest.mark.parametrize("breaks", [on_frame, listener, probe, lend, add_peer, refusal], ids=lambda f: f.__name__)
def test_what_breaks_for_one_peer_or_frame_ends_no_endpoint_and_later_rooms_are_served(
    world: World, breaks: Callable[[Rank, Rank], None]
) -> None:
    (prefill,), (decode,) = world.pair()
    breaks(prefill, decode)
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1])
    assert receiver.wait(30) is SUCCESS and sender.wait(30) is SUCCESS
    assert prefill.endpoint.failed is None and decode.endpoint.failed is None
    assert decode.pool.holds(1, [4])


def test_an_event_that_raises_fails_its_room_by_name_and_no_other(world: World) -> None:
    class Broken:
        def wait(self, timeout: float) -> bool:
            raise ZeroDivisionError(WORD)

    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([1], 0, Broken())
    assert receiver.wait(30) is FAILED and sender.wait(30) is FAILED
    assert WORD in str(sender.error) and WORD in str(receiver.error)
    receiver = ask(decode, 2, [5])
    sender = prefill.endpoint.send(room=2, tokens=TOKENS - 1)
    sender.chunk([2], 0, READY)
    sender.finish(b"")
    assert receiver.wait(30) is SUCCESS
