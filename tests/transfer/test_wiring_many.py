"""Many peers wired at once: transfers with the others go on meanwhile. Over the shipped fake agent."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from kv_world import Rank, World, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session import loader
from pdtransfer.session.api import TransferState
from pdtransfer.session.channel import Channel
from pdtransfer.session.frames import Hello

MANY = 64
LOAD = 0.03
"""Seconds that a load blocks, as measured with NIXL under load."""
HELD = 6


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def twins(world: World, card: RankCard, count: int) -> list[RankCard]:
    """Cards of ranks that exist as agents only."""
    made = []
    for i in range(count):
        name = f"twin-{i}"
        world.hub.agent(name)
        metadata = base64.b64encode(json.dumps({"fake": name}).encode()).decode()
        update = {"pod_uid": f"pod-{i}", "agent_name": name, "nixl_metadata": metadata}
        made.append(card.model_copy(update=update).sealed())
    return made


def slow_loads(rank: Rank, seconds: float, note: Callable[[], object]) -> list[object]:
    """Make this rank's agent slow at loading; what `note` says at each load."""
    seen: list[object] = []
    add = rank.agent.add_peer

    def slow(metadata: bytes) -> str:
        seen.append(note())
        time.sleep(seconds)
        return add(metadata)

    rank.agent.add_peer = slow  # type: ignore[method-assign]
    return seen


def steps(turns: Sequence[object]) -> list[int]:
    """Turns of the loop between one load and the next."""
    return [later - sooner for sooner, later in pairwise(turns)]  # type: ignore[operator]


def loads_until_the_end(world: World, load: float = LOAD) -> tuple[list[int], list[object]]:
    """A transfer that from the `HELD`th load on needs more turns than half of the loads leave runs while
    many peers are wired: the turns between the loads before its end, and all loads (the list grows).
    It is held until then because a fast loop has all those turns in the pause after one load. Its end is noted
    by the thread that loads: this one may get no core for the time of many loads."""
    (prefill,), (decode,) = world.pair()
    core = prefill.endpoint._core

    def note() -> int:
        if len(loads) == HELD - 1:
            prefill.agent.faults.stall_all = False
            for handle in prefill.agent.handles:
                handle.stalled = False
        return core.turns

    loads = slow_loads(prefill, load, note)
    prefill.agent.faults.stall_all = True
    prefill.agent.faults.delay_polls = 40 * loader.TURNS
    receiver = ask(decode, 1, [4, 5])
    sender = give(prefill, 1, [1, 2])
    ended: list[int] = []

    def changed() -> None:
        if sender.state is TransferState.SUCCESS:
            ended.append(len(loads))

    prefill.endpoint.on_change(changed)
    assert until(lambda: prefill.endpoint.inflight and core.mover.handles_in_flight)
    prefill.endpoint.apply_peers([decode.endpoint.card, *twins(world, decode.endpoint.card, MANY)])
    assert receiver.wait(60) is TransferState.SUCCESS and sender.wait(60) is TransferState.SUCCESS
    assert until(lambda: ended)
    return steps(loads[: ended[0]]), loads


def test_a_transfer_ends_long_before_the_last_of_many_peers_is_loaded(world: World) -> None:
    turns, loads = loads_until_the_end(world)
    assert HELD - 1 <= len(turns) < MANY - 1 and all(n >= loader.TURNS for n in turns)
    assert until(lambda: len(loads) == MANY, 30)


def test_without_the_pause_every_peer_would_come_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def one_turn(self: loader.Loader, took: float) -> None:
        await self._core.turn()

    monkeypatch.setattr(loader.Loader, "_rest", one_turn)
    turns, _ = loads_until_the_end(world, LOAD / 10)
    assert len(turns) == MANY - 1


def test_peers_are_loaded_without_pauses_when_nothing_moves(world: World) -> None:
    (prefill,), (decode,) = world.pair()
    core = prefill.endpoint._core
    assert until(lambda: not core.active)
    loads = slow_loads(prefill, 0.0, lambda: core.turns)
    prefill.endpoint.apply_peers([decode.endpoint.card, *twins(world, decode.endpoint.card, MANY)])
    assert until(lambda: len(loads) == MANY)
    assert all(n <= 2 for n in steps(loads))  # one to make progress, and one that had begun


def test_who_connects_is_loaded_before_those_who_do_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    greeted = threading.Event()
    real = Channel.send

    def send(self: Channel, frame: object) -> bool:
        sent = real(self, frame)
        if isinstance(frame, Hello):
            greeted.set()
        return sent

    monkeypatch.setattr(Channel, "send", send)
    loads = slow_loads(prefill, 0.01, lambda: greeted.wait(60))  # however late the one that exists comes
    added: list[str] = []
    add = prefill.agent.add_peer

    def noted(metadata: bytes) -> str:
        added.append(add(metadata))
        return added[-1]

    prefill.agent.add_peer = noted  # type: ignore[method-assign]
    # The one that exists comes last in the roster.
    prefill.endpoint.apply_peers([*twins(world, decode.endpoint.card, MANY), decode.endpoint.card])
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert decode.endpoint.wait_wired(20)
    assert until(lambda: len(loads) == MANY + 1, 20)
    assert added.index(decode.endpoint.card.agent_name) < MANY
    assert until(lambda: prefill.endpoint.verdicts[-1].state is VerdictState.WIRED)


def test_a_peer_that_leaves_before_its_turn_is_not_loaded_and_may_come_back(world: World) -> None:
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    left = threading.Event()
    loads = slow_loads(prefill, 0.02, lambda: left.wait(60))
    others = twins(world, decode.endpoint.card, 20)
    prefill.endpoint.apply_peers([*others, decode.endpoint.card])
    prefill.endpoint.apply_peers(others[:1])
    left.set()
    assert until(lambda: len(prefill.endpoint._wiring.loader) == 0)
    assert len(loads) < 5
    decode.endpoint.apply_peers([prefill.endpoint.card])
    prefill.endpoint.apply_peers([others[0], decode.endpoint.card])
    assert decode.endpoint.wait_wired(20) and until(lambda: prefill.endpoint.verdicts[-1].state is VerdictState.WIRED)


def test_a_card_that_breaks_the_agent_costs_only_its_own_peer(world: World) -> None:
    prefill, decode = world.rank(Role.PREFILL), world.rank(Role.DECODE)
    bad, *good = twins(world, decode.endpoint.card, 3)
    add = prefill.agent.add_peer

    def breaks(metadata: bytes) -> str:
        if b"twin-0" in metadata:
            raise RuntimeError("a binding that breaks")
        return add(metadata)

    prefill.agent.add_peer = breaks  # type: ignore[method-assign]
    prefill.endpoint.apply_peers([bad, *good, decode.endpoint.card])
    decode.endpoint.apply_peers([prefill.endpoint.card])
    assert decode.endpoint.wait_wired(20) and prefill.endpoint.failed is None
    states = {v.peer_pod_uid: (v.state, v.message) for v in prefill.endpoint.verdicts}
    assert states["pod-0"][0] is VerdictState.REFUSED and "a binding that breaks" in states["pod-0"][1]
    assert states["pod-1"][0] is VerdictState.PROBING
