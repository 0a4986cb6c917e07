"""Once faults stop (liveness): messages arrive, handles settle, connections come back, time passes and
dead sources are taken off the roster. Then every transfer ends, every page is free again, and a
transfer that was complete is reported as such."""

from __future__ import annotations

from pdtransfer.session.api import TransferState

from .actions import Action, apply, gate_name, gate_open, jump, stale_roster
from .bounds import TERMINAL, Violation
from .checks import check
from .records import Receipt
from .snapshot import fingerprint
from .world import World

ROUNDS = 200
"""Steps until everything that is on its way has come: about 70 are needed where four requests of two pages share two
slots and every connection is made anew."""
JUMPS = 200
PATIENCE = 3
"""Seconds within which what is complete is reported; every deadline of a transfer is longer."""


class Calm:
    """One world from the moment at which faults stop."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._due = [r for r in world.receipts if _complete(world, r)]
        self._dialled: set[int] = set()

    def next(self) -> Action | None:
        """What happens next without time passing; None: nothing."""
        world = self.world
        if world.network.pool:
            return ("deliver", world.network.pool[0].label)
        for gate in world.network.gates:
            if gate_open(world, gate) and id(gate.peer) not in self._dialled:
                self._dialled.add(id(gate.peer))
                return ("connect", *gate_name(world, gate))
        for flight in world.flights:
            if flight.state == "active" and world.may_land(flight):
                return ("land", str(flight.number))
        for rank in world.living:
            if stale_roster(world, rank):
                return ("roster", rank.name)
        return None

    def do(self, action: Action) -> None:
        """And keep it for the report."""
        self.world.after.append(" ".join(action))
        apply(self.world, action)

    def reported(self) -> None:
        """What was complete has not failed meanwhile."""
        for receipt in self._due:
            if receipt.transfer.state is TransferState.FAILED:
                raise Violation(f"attempt {receipt.attempt} was complete and failed: {receipt.transfer.error}")

    def conclude(self, good: set[int] | None = None) -> None:
        """Use up the world; raises Violation when it does not come to a good end. `good` are states with
        nothing under way that are known to come to one."""
        world = self.world
        if world.lossy:
            _reconnect(world)
            self._dialled.clear()
        self._run()
        for _ in range(PATIENCE):
            if any(r.transfer.state not in TERMINAL for r in self._due):
                world.loop.now += 1.0  # a broken data connection is made anew within a second
                world.settle()
                self._run()
        for receipt in self._due:
            if receipt.transfer.state is not TransferState.SUCCESS:
                told = f"{receipt.transfer.state}: {receipt.transfer.error}"
                raise Violation(f"attempt {receipt.attempt} was complete and is {told}")
        if good is not None:
            mark = fingerprint(world, budgets=False)
            if mark in good:
                return
            good.add(mark)  # a violation ends the search: nobody asks again
        self._wait()
        if not over(world):
            _bury(world)
            self._wait()
        check(world)
        if not over(world):
            raise Violation(f"no exit: {why_not(world)}")

    def _run(self) -> None:
        for _ in range(ROUNDS):
            action = self.next()
            if action is None:
                return
            self.do(action)
        raise Violation("messages without end")

    def _wait(self) -> None:
        for _ in range(JUMPS):
            self._dialled.clear()
            self._run()
            if over(self.world) or not jump(self.world):
                return
            self.world.after.append("time")
            self.world.settle()


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


def _bury(world: World) -> None:
    """Sources with a handle that errored leave for good."""
    for rank in world.prefills:
        if rank.alive and any(f.source is rank and f.state in ("lost", "late") for f in world.flights):
            world.kill(rank)
            world.after.append(f"kill {rank.name}")
    world.settle()


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
