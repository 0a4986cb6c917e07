"""What may happen next in a world, and how it is done. An action is a tuple of plain values, so that
a path can be printed and replayed."""

from __future__ import annotations

from collections.abc import Iterator

from pdtransfer.session.api import TransferState

from .bounds import ROOMS, TERMINAL
from .network import Gate, Message
from .ranks import Rank
from .records import Flight, Receipt, Sending
from .world import World

Action = tuple[str, ...]
POLLED = 0.1
"""Seconds; timers shorter than that are a task that looks again and again."""


def enabled(world: World) -> list[Action]:
    """Every action that is possible, in a fixed order."""
    return [*_engines(world), *_messages(world), *_handles(world), *_faults(world)]


def _left(world: World, name: str) -> bool:
    return world.used.get(name, 0) < getattr(world.bounds, name)


def _use(world: World, name: str) -> None:
    world.used[name] = world.used.get(name, 0) + 1


def _last(world: World, rank: Rank, room: int) -> Receipt | None:
    return next((r for r in reversed(world.receipts) if r.rank is rank and r.room == room), None)


def _sending(world: World, rank: Rank, room: int) -> Sending | None:
    return next((s for s in reversed(world.sendings) if s.rank is rank and s.sender.room == room), None)


def _engines(world: World) -> Iterator[Action]:
    bounds = world.bounds
    for room in ROOMS[: bounds.rooms]:
        of = (str(room),) if bounds.rooms > 1 else ()
        for rank in world.decodes:
            if rank.alive and rank.endpoint._roster:
                for name in _decode(world, rank, room):
                    yield (name, rank.name, *of)
        for rank in world.prefills:
            if rank.alive:
                for name in _prefill(world, rank, room):
                    yield (name, rank.name, *of)


def _decode(world: World, rank: Rank, room: int) -> Iterator[str]:
    last = _last(world, rank, room)
    if last is None or last.transfer.state is TransferState.FAILED:
        enough = len(world.pages_for(rank)) == world.bounds.pages
        if world.tries(rank, room) < world.bounds.attempts and enough:
            yield "receive"
    elif last.transfer.state not in TERMINAL and _left(world, "aborts"):
        yield "abort"


def _prefill(world: World, rank: Rank, room: int) -> Iterator[str]:
    sending = _sending(world, rank, room)
    if sending is None or sending.sender.state in TERMINAL:
        sent = sum(s.rank is rank and s.sender.room == room for s in world.sendings)
        if sent < world.bounds.sends:
            yield "send"
    else:
        if sending.given < world.bounds.pages:
            yield "chunk"
        if _left(world, "prefill_aborts"):
            yield "give up"


def _messages(world: World) -> Iterator[Action]:
    labels = sorted({m.label for m in world.network.pool})
    for label in labels:
        yield ("deliver", label)
    if _left(world, "losses"):
        for label in labels:
            yield ("lose", label)
    if _left(world, "doublings"):
        for label in sorted({m.label for m in world.network.pool if not m.doubled}):
            yield ("double", label)


def _handles(world: World) -> Iterator[Action]:
    for flight in world.flights:
        if not world.may_land(flight):
            continue
        if flight.state == "active":
            yield ("land", str(flight.number))
            if flight.source.alive and _left(world, "errors"):
                yield ("err", str(flight.number))
        elif flight.state == "lost" and _left(world, "lates"):
            yield ("land late", str(flight.number))


def _faults(world: World) -> Iterator[Action]:
    for gate in world.network.gates:
        if gate_open(world, gate):
            yield ("connect", *gate_name(world, gate))
    if _left(world, "breaks"):
        for decode in world.decodes:
            for prefill in world.prefills:
                if world.network.connected(decode.where, prefill.where):
                    yield ("break", decode.name, prefill.name)
    for rank in (*world.prefills, *world.decodes):
        prefill = rank in world.prefills
        if rank.alive and _left(world, "kills" if prefill else "decode_kills"):
            yield ("kill", rank.name)
        elif not rank.alive:
            yield ("restart", rank.name)
        if rank.alive and (stale_roster(world, rank) or (prefill and _left(world, "flips"))):
            yield ("roster", rank.name)
    if _left(world, "jumps"):
        yield ("time",)


def stale_roster(world: World, rank: Rank) -> bool:
    """Its roster names other ranks than the living ones that it exchanges KV with."""
    others = world.prefills if rank in world.decodes else world.decodes
    named = {((c.pod_uid, c.rank), c.incarnation) for c in rank.endpoint._roster}
    return named != {o.where for o in others if o.alive and world.meet(rank, o)}


def gate_open(world: World, gate: Gate) -> bool:
    """Its rank lives and may dial again."""
    return world.at(gate.rank) is not None


def gate_name(world: World, gate: Gate) -> tuple[str, str]:
    """Who dials whom."""
    return (f"d{gate.rank[0][1]}", f"p{gate.peer.key[1]}/{gate.peer.card.incarnation}")


def apply(world: World, action: Action) -> None:
    """Do it, and run what follows from it without time passing."""
    name, args = action[0], action[1:]
    if name in _ON_RANKS:
        rank = next(r for r in (*world.prefills, *world.decodes) if r.name == args[0])
        _ON_RANKS[name](world, rank, int(args[1]) if len(args) > 1 else ROOMS[0])
    elif name in ("deliver", "lose", "double"):
        _on_message(world, name, _named(world, args[0]))
    elif name in ("land", "err", "land late"):
        on_handle(world, name, world.flights[int(args[0])])
    elif name == "connect":
        next(g for g in world.network.gates if gate_name(world, g) == args).opened.set()
    elif name == "break":
        _use(world, "breaks")
        for decode in world.decodes:
            for prefill in world.prefills:
                if (decode.name, prefill.name) == args:
                    for end in world.network.connected(decode.where, prefill.where):
                        end.break_()
    elif name == "time":
        _use(world, "jumps")
        jump(world)
    else:
        raise ValueError(f"no action {action}")
    world.settle()


def _named(world: World, label: str) -> Message:
    """Paths in tests may name a message by the first words of its label."""
    return next(m for m in world.network.pool if f"{m.label} ".startswith(f"{label} "))


def jump(world: World) -> bool:
    """To just after the next deadline; False when there is none."""
    from .snapshot import deadlines

    now = world.loop.now
    coming = [t for t in deadlines(world) if t > now]
    if not coming:
        return False
    # What looks again every few milliseconds looks once; when nothing else is awaited, a second passes.
    world.loop.now = min((t for t in coming if t > now + POLLED), default=now + 1.0) + 0.01
    world.network.expire()
    return True


def _on_message(world: World, name: str, message: Message) -> None:
    if name == "deliver":
        world.deliver(message)
        return
    _use(world, "losses" if name == "lose" else "doublings")
    if name == "lose":
        world.network.take(message)
        world.lossy = True
    else:
        message.doubled = True
        twin = Message(message.sender, message.receiver, message.frame, message.receiver_end, message.sent_at, True)
        world.network.pool.append(twin)


def on_handle(world: World, name: str, flight: Flight) -> None:
    """A handle's bytes land, or it errors, or an errored one's bytes land after all."""
    if name == "err":
        _use(world, "errors")
        flight.state = "lost"
        flight.handle.broken = True
    elif flight.source.alive and name == "land":
        flight.state = "done"
        flight.handle.stalled = False
    else:
        if name == "land late":
            _use(world, "lates")
        flight.state = "late"
        flight.source.agent.land(flight.handle)


def _receive(world: World, rank: Rank, room: int) -> None:
    world.receive(rank, room)


def _abort(world: World, rank: Rank, room: int) -> None:
    _use(world, "aborts")
    last = _last(world, rank, room)
    assert last is not None
    last.transfer.abort("retracted")


def _send(world: World, rank: Rank, room: int) -> None:
    world.send(rank, room)


def _chunk(world: World, rank: Rank, room: int) -> None:
    sending = _sending(world, rank, room)
    assert sending is not None
    world.chunk(sending)


def _give_up(world: World, rank: Rank, room: int) -> None:
    _use(world, "prefill_aborts")
    sending = _sending(world, rank, room)
    assert sending is not None
    sending.sender.abort("the client left")


def _kill(world: World, rank: Rank, room: int) -> None:
    _use(world, "kills" if rank in world.prefills else "decode_kills")
    world.kill(rank)


def _restart(world: World, rank: Rank, room: int) -> None:
    world.restart(rank)


def _roster(world: World, rank: Rank, room: int) -> None:
    if rank in world.decodes:
        world.roster(rank, world.prefills)
    elif rank.endpoint._roster:
        _use(world, "flips")
        world.roster(rank, [])
    else:
        world.roster(rank, world.decodes)


_ON_RANKS = {
    "receive": _receive,
    "abort": _abort,
    "send": _send,
    "chunk": _chunk,
    "give up": _give_up,
    "kill": _kill,
    "restart": _restart,
    "roster": _roster,
}
