"""What must hold in every state of a world (safety). Values come from the memory, from what was posted
and sent, and from what the engines are told; never from what the session believes about itself."""

from __future__ import annotations

from pdtransfer.session.api import TransferState

from .bounds import TERMINAL, Violation
from .ranks import CANARY, golden
from .records import Receipt
from .world import World

QUIET_COUNTERS = ("frame_errors", "task_errors")
"""Counters of things that never happen without an error in the code."""


def check(world: World) -> None:
    """Raises Violation."""
    _nothing_broke(world)
    _writes_have_owners(world)
    _answers_hold(world)
    _successes_are_true(world)
    _freed_pages_stay(world)
    _pages_are_conserved(world)
    _slots_are_conserved(world)
    _ends_are_counted_once(world)


def _nothing_broke(world: World) -> None:
    for rank in world.living:
        if rank.core.failed is not None:
            raise Violation(f"{rank.name}: {rank.core.failed}") from rank.core.failed
        for name in QUIET_COUNTERS:
            if rank.core.tally.counts[name]:
                raise Violation(f"{rank.name}: {rank.core.tally.counts[name]} {name}")


def _writes_have_owners(world: World) -> None:
    """A handle that may still write holds its transfer's pages: nobody else may use them."""
    for flight in world.flights:
        if not world.may_land(flight) or flight.target is None or not flight.target.alive:
            continue
        receipt = world.receipt_of(flight)
        if receipt is None:
            raise Violation(f"handle {flight.number} writes for {flight.leg[0]}, which nobody asked for")
        if not set(flight.pages) <= set(receipt.pages):
            raise Violation(f"handle {flight.number} writes pages {flight.pages}, asked were {receipt.pages}")
        if not set(flight.slots) <= held_slots(receipt):
            raise Violation(
                f"slots {flight.slots} are not held for attempt {receipt.attempt}, handle {flight.number} may land"
            )
        if flight.pages and receipt.transfer.state in TERMINAL and receipt.transfer.pages_releasable:
            raise Violation(
                f"pages {flight.pages} of attempt {receipt.attempt} are free, handle {flight.number} may land"
            )


def held_slots(receipt: Receipt) -> set[int]:
    """Slots that decode lends to this attempt, or keeps from use after it."""
    book = receipt.rank.endpoint._destination.intake.book
    key = (receipt.room, receipt.attempt)
    legs = [(leg, out) for leg, out in book._out.items() if (leg.request.room, leg.request.attempt) == key]
    return {ticket.slot for _, out in legs for ticket in out.values()}


def _freed_pages_stay(world: World) -> None:
    """No byte comes into a page that the engine got back."""
    for receipt in world.receipts:
        if receipt.marked and not receipt.freed and receipt.rank.alive:
            for page in receipt.pages:
                if (receipt.rank.memory[page] != CANARY).any():
                    raise Violation(f"page {page} was given back after attempt {receipt.attempt} and was written to")


def _slots_are_conserved(world: World) -> None:
    """Every slot is free, or lent once."""
    for rank in world.living:
        for arena in rank.endpoint.card.staging:
            counts = rank.endpoint._destination.intake.book.counts()
            out = [t.slot for held in rank.endpoint._destination.intake.book._out.values() for t in held.values()]
            if sum(counts.values()) != arena.slots or len(out) != len(set(out)):
                raise Violation(f"{rank.name}: {arena.slots} slots, counted {counts}, lent {sorted(out)}")


def _answers_hold(world: World) -> None:
    """Once a source said that nothing of an identity can land, nothing can."""
    for flight in world.flights:
        if flight.source.alive and flight.leg in world.settled and world.may_land(flight):
            raise Violation(f"attempt {flight.leg[0].attempt} was acknowledged, handle {flight.number} may land")


def _successes_are_true(world: World) -> None:
    for receipt in world.receipts:
        if receipt.transfer.state is not TransferState.SUCCESS or receipt.freed or not receipt.rank.alive:
            continue
        for number, page in enumerate(receipt.pages):
            wanted = golden(receipt.room, number)
            if (receipt.rank.memory[page] != wanted).any():
                raise Violation(f"attempt {receipt.attempt} succeeded, page {page} does not hold its bytes")
        if receipt.transfer.metadata != b"meta":
            raise Violation(f"attempt {receipt.attempt} succeeded with metadata {receipt.transfer.metadata!r}")
        _was_done(world, receipt)


def _was_done(world: World, receipt: Receipt) -> None:
    if not all(leg in world.done for leg in world.legs_of(receipt)):
        raise Violation(f"attempt {receipt.attempt} succeeded without a completion of its own from every source")


def _pages_are_conserved(world: World) -> None:
    """Free, owned and quarantined pages are the pool; owned ones belong to a transfer that goes on."""
    for rank in world.decodes:
        if not rank.alive:
            continue
        ledger = rank.endpoint._destination.ledger
        live = [r for r in world.receipts if r.rank is rank and r.transfer.state not in TERMINAL]
        held = [r for r in world.receipts if r.rank is rank and r.transfer.state in TERMINAL and world.held_by(r)]
        owned, quarantined = sum(len(r.pages) for r in live), sum(len(r.pages) for r in held)
        if (ledger.owned_pages, ledger.quarantined_pages) != (owned, quarantined):
            raise Violation(
                f"{rank.name}: ledger has {ledger.owned_pages} owned and {ledger.quarantined_pages} quarantined pages, "
                f"its transfers {owned} and {quarantined}"
            )
        pages = [p for r in (*live, *held) for p in r.pages]
        if len(pages) != len(set(pages)):
            raise Violation(f"{rank.name}: two transfers hold one page: {sorted(pages)}")


def _ends_are_counted_once(world: World) -> None:
    for rank in world.living:
        mine = [r.transfer.state for r in world.receipts if r.rank is rank]
        mine += [s.sender.state for s in world.sendings if s.rank is rank]
        ended = sum(state in TERMINAL for state in mine)
        counted = rank.core.tally.counts["transfers"]
        if counted > ended:
            raise Violation(f"{rank.name}: {counted} ends were counted, {ended} transfers ended")
