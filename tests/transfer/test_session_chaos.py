"""Seeded chaos over the fake fabric: whatever happens, bytes land only in pages that a transfer
owns, Success means the right bytes, every state ends, and every page comes back."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
from kv_world import BOOTSTRAP, PAGES, READY, TOKENS, World, until

from pdtransfer.agent.fake import FakeHandle
from pdtransfer.session import selfcheck
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import Abort, Request

TIMES = Timeouts(waiting=0.8, transfer=0.5, settle=0.1, connect=0.6, probe=3)
SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


class Canary:
    """Sees every landing: the page it hits must be owned or quarantined at that moment."""

    def __init__(self, decode) -> None:
        self.violations: list[str] = []
        self.landings = 0
        self._ranges = []
        for rank in decode:
            for array in rank.pool.arrays.values():
                start = int(array.ctypes.data)
                self._ranges.append((start, start + array.nbytes, array[0].nbytes, rank))

    def __call__(self, handle: FakeHandle) -> None:
        for address in handle.destination[:, 0].tolist():
            for start, end, item, rank in self._ranges:
                if start <= address < end:
                    self.landings += 1
                    page = (address - start) // item
                    if rank.endpoint._destination.ledger._owner.get(page) is None:
                        self.violations.append(f"page {page} of decode {rank.pool.tp} is free")


@pytest.mark.parametrize("seed", range(int(os.environ.get("PD_CHAOS_SEEDS", "2"))))
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1), (1, 2)])
def test_chaos_never_lets_a_byte_land_in_a_free_page_and_every_page_comes_back(seed, p, d):
    rng = random.Random(seed)
    world = World()
    try:
        prefill, decode = world.pair(p, d, timeouts=TIMES)
        canary = Canary(decode)
        for rank in prefill:
            rank.agent.on_land = canary
        outcome = chaos(rng, world, prefill, decode)
        assert not canary.violations, canary.violations[:3]
        assert canary.landings > 0
        assert outcome["succeeded"] > 0 and outcome["failed"] > 0, outcome  # both paths were taken
    finally:
        world.close()


def test_the_canary_sees_a_write_into_a_free_page():
    """Negative control: the same checker must fail when a page is given back too early."""
    world = World()
    try:
        (prefill,), (decode,) = world.pair(timeouts=TIMES)
        canary = Canary([decode])
        prefill.agent.on_land = canary
        prefill.agent.faults.stall_all = True
        decode.endpoint.receive(room=1, attempt=0, bootstrap=BOOTSTRAP, pages=[3], tokens=1)
        sender = prefill.endpoint.send(room=1, tokens=1)
        sender.chunk([1], 0, READY)
        sender.finish(b"")
        assert until(lambda: prefill.agent.faults.seen)
        ledger = decode.endpoint._destination.ledger
        ledger._drop((1, 0))  # the seeded bug: a deadline frees the pages
        world.hub.unstall(prefill.agent.name)
        assert canary.violations
    finally:
        world.close()


def chaos(rng: random.Random, world: World, prefill, decode) -> dict[str, int]:
    held: dict[int, tuple[list, list, list[int], list[int]]] = {}
    free, source_free = set(range(PAGES)), set(range(PAGES))
    outcome = {"succeeded": 0, "failed": 0}
    room = 0
    began = time.monotonic()
    for rank in prefill:  # requests and probes are struck; the copy within the rank is asked when too many were
        rank.agent.spares = within(rank)

    def goes_on() -> bool:
        """For a while, and until requests ended both ways."""
        took = time.monotonic() - began
        return took < 1.6 or (took < 60 and not all(outcome.values()))

    def reap() -> None:
        for number, (receivers, senders, pages, source) in list(held.items()):
            states = [r.state for r in receivers]
            if not all(s in (SUCCESS, FAILED) for s in states):
                continue
            for rank, receiver in zip(decode, receivers, strict=True):
                if receiver.state is SUCCESS:
                    assert rank.pool.holds(number, pages) and receiver.metadata == b"m%d" % number
                else:
                    assert receiver.metadata is None and receiver.error is not None
            if not all(r.pages_releasable for r in receivers):
                continue
            if not all(s.state in (SUCCESS, FAILED) for s in senders):
                continue
            outcome["succeeded" if set(states) == {SUCCESS} else "failed"] += 1
            free.update(pages)
            source_free.update(source)
            del held[number]

    while goes_on():
        assert all(r.endpoint.failed is None for r in (*prefill, *decode))
        action = rng.random()
        if action < 0.45 and len(free) >= 4 and len(held) < 5:
            room += 1
            pages = rng.sample(sorted(free), rng.randint(1, 4))
            free.difference_update(pages)
            source = rng.sample(sorted(source_free), len(pages))
            source_free.difference_update(source)
            receivers, senders = [], []

            def ask(number=room, pages=pages, into=receivers) -> None:
                for rank in decode:
                    receiver = rank.endpoint.receive(
                        room=number, attempt=0, bootstrap=BOOTSTRAP, pages=pages, tokens=len(pages) * TOKENS
                    )
                    into.append(receiver)

            def give(number=room, source=source, into=senders) -> None:
                for rank in prefill:
                    rank.pool.fill(number, source)
                    sender = rank.endpoint.send(room=number, tokens=len(source) * TOKENS)
                    for i, page in enumerate(source):
                        sender.chunk([page], i, READY)
                    sender.finish(b"m%d" % number)
                    into.append(sender)

            for step in rng.sample([ask, give], 2):
                step()
            held[room] = (receivers, senders, pages, source)
        elif action < 0.55:
            rank = rng.choice(prefill)
            rank.agent.faults.stall.add(rank.agent.posts + rng.randint(1, 3))
        elif action < 0.63:
            rank = rng.choice(prefill)
            rank.agent.faults.fail_post.add(rank.agent.posts + rng.randint(1, 3))
        elif action < 0.75:
            for rank in prefill:
                world.hub.unstall(rank.agent.name)
        elif action < 0.82 and held:
            receivers, senders, *_ = held[rng.choice(sorted(held))]
            rng.choice(receivers + senders).abort("chaos")
        elif action < 0.88:
            rank = rng.choice(prefill + decode)
            rank.endpoint._core.call(cut, rank)
        elif action < 0.91:
            flip(rng.choice(prefill + decode))
        elif held:
            rank = rng.choice(decode)
            rank.endpoint._core.call(duplicate, rank)
            rank = rng.choice(prefill)
            rank.endpoint._core.call(echo, rank)
        reap()
        time.sleep(rng.random() * 0.02)
    for rank in prefill:
        rank.agent.faults.stall.clear()
        rank.agent.faults.fail_post.clear()

    def over() -> bool:
        for rank in prefill:
            world.hub.unstall(rank.agent.name)
        reap()
        return not held

    assert until(over), {n: [(r.state, r.error, r.pages_releasable) for r in h[0]] for n, h in held.items()}
    for rank in decode:
        ledger = rank.endpoint._destination.ledger
        assert (ledger.owned_pages, ledger.quarantined_pages) == (0, 0)
    assert until(lambda: sum(r.endpoint.inflight for r in (*prefill, *decode)) == 0)
    assert all(r.endpoint.failed is None for r in (*prefill, *decode))
    return outcome


def within(rank):
    """Whether local rows belong to the copy within the rank: of all that uses scratch it alone has those bytes."""
    scratch = rank.endpoint._wiring.prober.scratch
    inside = range(scratch.address, scratch.address + scratch.memory.nbytes)
    return lambda rows: int(rows[0, 0]) in inside and len(rows) == 1 and int(rows[0, 1]) == selfcheck.BYTES


def flip(rank) -> None:
    """Its roster loses every peer and gets them back."""
    roster = rank.endpoint._roster
    rank.endpoint.apply_peers([])
    rank.endpoint.apply_peers(roster)


def cut(rank) -> None:
    """End one control connection as a network would."""
    for peer in rank.endpoint._wiring._peers.values():
        if peer.channel is not None:
            peer.channel._transport.abort()
            return


def duplicate(rank) -> None:
    """Repeat every request that is known."""
    side = rank.endpoint._destination
    for receive in (*side._live.values(), *side._settling.values()):
        for leg in receive.legs.values():
            if leg.sent and leg.peer is not None:
                assert isinstance(leg.request, Request)
                rank.endpoint._wiring.send(leg.peer, leg.request)
                if receive.key in side._settling:
                    rank.endpoint._wiring.send(leg.peer, Abort(**leg.request.ids, reason="again"))


def echo(rank) -> None:
    """Repeat every answer that was given, long after it was."""
    wiring = rank.endpoint._wiring
    for (key, _), tomb in list(rank.endpoint._source.askers._tombs._held.items()):
        peer = wiring.peers.get(key)
        if peer is not None:
            wiring.send(peer, tomb.answer)


def test_golden_bytes_differ_between_rooms():
    """Or `holds` would prove nothing."""
    from kv_world import golden

    assert not np.array_equal(golden(1, 0, 0, "K"), golden(2, 0, 0, "K"))
