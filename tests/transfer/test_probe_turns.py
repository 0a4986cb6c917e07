"""Probes of peers whose data path is dead take until their deadline; the others do not wait for them."""

from __future__ import annotations

import asyncio

from kv_world import QUICK, Rank, World, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.api import Timeouts
from pdtransfer.session.probe import CONCURRENT
from pdtransfer.session.turns import Turns

PATIENT = Timeouts(waiting=QUICK.waiting, transfer=QUICK.transfer, settle=QUICK.settle, connect=30, probe=120)


def test_a_peer_that_is_well_is_wired_while_probes_of_dead_ones_go_on(world: World) -> None:
    def prefill(name: str) -> Rank:
        return world.rank(
            Role.PREFILL, timeouts=PATIENT, incarnation=name, card=lambda c: c.model_copy(update={"pod_uid": name})
        )

    dead = [prefill(f"dead-{n}") for n in range(CONCURRENT + 1)]
    well = prefill("well")
    decode = world.rank(Role.DECODE, timeouts=PATIENT)
    names = {rank.agent.name for rank in dead}
    post = decode.agent.post

    def stalls(operation, local, local_indices, remote, remote_indices, notification=b""):
        handle = post(operation, local, local_indices, remote, remote_indices, notification)
        handle.stalled = remote.owner in names
        return handle

    decode.agent.post = stalls
    world.wire([*dead, well], [decode], wait=False)

    def state(incarnation: str) -> VerdictState | None:
        found = (v for v in decode.endpoint.verdicts if v.peer_incarnation == incarnation)
        return next((v.state for v in found), None)

    assert until(lambda: state("well") is VerdictState.WIRED), decode.endpoint.verdicts
    assert {state(f"dead-{n}") for n in range(3)} == {VerdictState.PROBING}  # their deadline is far away
    names.clear()
    world.hub.unstall(decode.agent.name)
    assert until(lambda: all(state(f"dead-{n}") is VerdictState.WIRED for n in range(3))), decode.endpoint.verdicts


async def test_turns_are_few_end_by_themselves_and_are_bounded_in_all() -> None:
    turns, order, go, second = Turns(1, 0.01, 2), [], asyncio.Event(), asyncio.Event()

    async def hold(name: str) -> None:
        async with turns.taken():
            order.append(name)
            if len(order) == 2:
                second.set()
            await go.wait()

    tasks = [asyncio.create_task(hold(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert order == ["a"]  # one turn
    await asyncio.wait_for(second.wait(), 10)
    assert order == ["a", "b"]  # a's ended; c is one more than may go on in all
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert turns._turns._value == 1 and turns._all._value == 2  # every turn came back once
