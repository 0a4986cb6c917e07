"""Once faults stop (liveness): messages arrive, handles settle, connections come back, time passes and
dead sources are taken off the roster. Then every transfer ends, every page is free again, and a
transfer that was complete is reported as such."""

from __future__ import annotations

from pdtransfer.session.api import TransferState

from .actions import gate_name, gate_open, jump, on_handle, stale_roster
from .bounds import TERMINAL, Violation
from .checks import check
from .records import Receipt
from .snapshot import fingerprint
from .world import World

ROUNDS = 60
JUMPS = 60


def conclude(world: World, good: set[int] | None = None) -> None:
    """Use up the world; raises Violation when it does not come to a good end. `good` are states without
    anything under way that are known to come to one."""
    due = [r for r in world.receipts if _complete(world, r)]
    if world.lossy:
        _reconnect(world)
    _run(world)
    for receipt in due:
        if receipt.transfer.state is not TransferState.SUCCESS:
            raise Violation(
                f"attempt {receipt.attempt} was complete and is {receipt.transfer.state}: {receipt.transfer.error}"
            )
    if good is not None:
        mark = fingerprint(world, budgets=False)
        if mark in good:
            return
        good.add(mark)  # a violation ends the search: nobody asks again
    for _ in range(JUMPS):
        if over(world) or not _time(world):
            break
        _run(world)
    if not over(world):
        _bury(world)
    check(world)
    if not over(world):
        raise Violation(f"no exit: {why_not(world)}")


def _complete(world: World, receipt: Receipt) -> bool:
    """It goes on, every source has written all of it, lives, and knows this rank by its roster."""
    sources = [world.at(where) for where in receipt.sources]
    return (
        receipt.transfer.state not in TERMINAL
        and receipt.rank.alive
        and all(leg in world.done for leg in world.legs_of(receipt))
        and all(source is not None and not stale_roster(world, source) for source in sources)
        and not stale_roster(world, receipt.rank)
    )


def _reconnect(world: World) -> None:
    """What loses messages is a connection that ends."""
    for decode in world.decodes:
        for prefill in world.prefills:
            for end in world.network.connected(decode.where, prefill.where):
                end.break_()
    world.after.append("break every connection")
    world.settle()


def _run(world: World) -> None:
    """Everything that can happen without time passing."""
    dialled: set[int] = set()
    for _ in range(ROUNDS):
        step = _step(world, dialled)
        if not step:
            return
        world.after.append(step)
        world.settle()
    raise Violation("messages without end")


def _step(world: World, dialled: set[int]) -> str:
    network = world.network
    if network.pool:
        label = network.pool[0].label
        world.deliver(network.pool[0])
        return f"deliver {label}"
    for gate in network.gates:
        if gate_open(world, gate) and id(gate.peer) not in dialled:
            dialled.add(id(gate.peer))
            gate.opened.set()
            return " ".join(("connect", *gate_name(world, gate)))
    for flight in world.flights:
        if flight.state == "active" and world.may_land(flight):
            on_handle(world, "land", flight)
            return f"land {flight.number}"
    for rank in world.living:
        if stale_roster(world, rank):
            world.roster(rank, world.prefills if rank in world.decodes else world.decodes)
            return f"roster {rank.name}"
    return ""


def _time(world: World) -> bool:
    if not jump(world):
        return False
    world.after.append("time")
    world.settle()
    return True


def _bury(world: World) -> None:
    """Sources with a handle that errored, and those that are gone, leave for good."""
    for rank in world.prefills:
        if rank.alive and any(f.source is rank and f.state in ("lost", "late") for f in world.flights):
            world.kill(rank)
            world.after.append(f"kill {rank.name}")
    for _ in range(JUMPS):
        _run(world)
        if over(world) or not _time(world):
            return


def over(world: World) -> bool:
    """Nothing is left to wait for."""
    return not why_not(world)


def why_not(world: World) -> list[str]:
    """What is left."""
    left = []
    for receipt in world.receipts:
        if receipt.rank.alive and receipt.transfer.state not in TERMINAL:
            left.append(f"attempt {receipt.attempt} is {receipt.transfer.state}")
        elif receipt.rank.alive and not receipt.transfer.pages_releasable:
            left.append(f"pages {receipt.pages} of attempt {receipt.attempt} are not free")
    for sending in world.sendings:
        if sending.rank.alive and sending.sender.state not in TERMINAL:
            left.append(f"a send is {sending.sender.state}")
    for rank in world.living:
        if rank.endpoint.inflight:
            left.append(f"{rank.name} counts {rank.endpoint.inflight} in flight")
    return left
