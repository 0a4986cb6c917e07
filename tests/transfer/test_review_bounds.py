"""Bounds that nothing else forces: descriptors in flight, connections of nobody, an agent that never progresses again,
turns of an idle rank, an attempt that comes after its successor."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from kv_world import READY, TOKENS, World, ask, first_request, until
from mover_kit import Bench, Lists, lazy_job

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import Role
from pdtransfer.mover.jobs import HANDLE_PIECES, Prepped
from pdtransfer.mover.window import PEER_HANDLES, WINDOW_PIECES
from pdtransfer.session import connections, core
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import Failed

LONG = Timeouts(waiting=60, transfer=60, settle=5, connect=60, probe=60)


@pytest.mark.parametrize(("pieces", "most"), [(WINDOW_PIECES // 2, 2), (WINDOW_PIECES // 5, 5), (1, 2 * PEER_HANDLES)])
def test_descriptors_in_flight_are_bounded_whatever_their_bytes(pieces: int, most: int) -> None:
    """UCX keeps 4.3 kB for each put that is outstanding over TCP, and queues them without bound."""
    assert WINDOW_PIECES * 4300 < 150 << 20 and HANDLE_PIECES <= WINDOW_PIECES // 2
    bench = Bench()
    bench.agent.faults.delay_polls = 3
    for peer in ("a", "b"):
        lists = Lists(bench, peer)
        item = lists.item(0)
        items = (
            Prepped(item.local, item.local_indices, item.remote, item.remote_indices, 64, pieces) for _ in range(20)
        )
        lazy_job(bench, peer, items)
    seen = flying = 0
    for _ in range(300):
        bench.now += 0.001
        bench.mover.step()
        seen = max(seen, bench.mover.handles_in_flight)
        flying = max(flying, sum(f.item.pieces for f in bench.mover._window.fresh))
    assert seen == most and flying == most * pieces <= WINDOW_PIECES
    assert len(bench.ended) == 2


def test_connections_of_nobody_are_bounded_and_the_next_one_is_served_when_one_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 2)
    rank = world.rank(Role.PREFILL, timeouts=LONG)
    host, _, port = rank.endpoint.card.control.rpartition(":")

    def dial() -> socket.socket:
        return socket.create_connection((host, int(port)), timeout=20)

    held = [dial() for _ in range(2)]
    assert until(lambda: rank.endpoint._wiring.connections._strangers == 2)
    with dial() as third:
        assert third.recv(100) == b""  # at once, long before any deadline
    assert rank.endpoint.counters["connections_refused"] == 1
    held.pop().close()
    assert until(lambda: rank.endpoint._wiring.connections._strangers == 1)
    held.append(dial())
    assert until(lambda: rank.endpoint._wiring.connections._strangers == 2)
    for one in held:
        one.close()
    assert until(lambda: rank.endpoint._wiring.connections._strangers == 0)
    assert rank.endpoint.counters["connections_refused"] == 1 and rank.endpoint.failed is None


def test_an_agent_that_never_progresses_again_ends_its_rank_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "BAD_TURNS", 5)
    (prefill,), (decode,) = world.pair(timeouts=LONG)
    receiver = ask(decode, 1, [4])

    def broken() -> Any:
        prefill.agent.faults.seen.append("progress")
        raise AgentFailure("nixlBackendError", "injected: no progress", posted=False)

    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    prefill.agent.progress = broken  # type: ignore[method-assign]
    assert sender.wait(30) is TransferState.FAILED and "no progress" in str(prefill.endpoint.failed)
    assert prefill.agent.faults.seen.count("progress") == 6
    receiver.abort("over")
    assert receiver.wait(30) is TransferState.FAILED and decode.endpoint.failed is None


def test_an_idle_rank_turns_some_twenty_times_a_second_and_a_busy_one_without_pause(world: World) -> None:
    (prefill,), (decode,) = world.pair(timeouts=LONG)
    for rank in (prefill, decode):
        assert until(lambda rank=rank: not rank.endpoint._core.active)
    time.sleep(0.2)
    assert turns(prefill.endpoint._core, 2.0) <= 50  # 20 are due
    prefill.agent.faults.stall_all = True
    ask(decode, 1, [4])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([1], 0, READY)
    assert until(lambda: prefill.agent.faults.seen)
    assert until(lambda: turns(prefill.endpoint._core, 0.5) > 150)


def turns(of: core.Core, seconds: float) -> float:
    """Turns a second of a rank's loop, over that time."""
    before, began = of.turns, time.monotonic()
    time.sleep(seconds)
    return (of.turns - before) / (time.monotonic() - began)


def test_an_attempt_that_comes_after_its_successor_is_refused_and_costs_the_successor_nothing(world: World) -> None:
    (prefill,), (decode,) = world.pair(timeouts=LONG)
    heard: list[Failed] = []
    hooks = decode.endpoint._wiring.hooks
    real = hooks.on_frame
    hooks.on_frame = lambda peer, frame: (heard.extend([frame] * isinstance(frame, Failed)), real(peer, frame))  # type: ignore[assignment, method-assign]
    receiver = ask(decode, 1, [4], attempt=2)
    assert until(lambda: prefill.endpoint.asked(1) is not None)
    (peer,) = decode.endpoint._wiring.peers.values()
    late = first_request(attempt=1, pages=(5,))
    decode.endpoint._core.call(decode.endpoint._wiring.send, peer, late)
    assert until(lambda: heard)
    assert (heard[0].attempt, heard[0].settled) == (1, True) and "attempt 2" in heard[0].message
    prefill.pool.fill(1, [1])
    sender = prefill.endpoint.send(room=1, tokens=TOKENS - 1)
    sender.chunk([1], 0, READY)
    sender.finish(b"")
    assert receiver.wait(30) is TransferState.SUCCESS and sender.wait(30) is TransferState.SUCCESS
    assert decode.pool.holds(1, [4]) and decode.pool.untouched([4])
