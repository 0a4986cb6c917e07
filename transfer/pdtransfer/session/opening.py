"""A decode request as it begins: checked, and asked of every prefill rank that holds a part, each with the
strategy that suits that pair. Runs in the engine's thread."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import LayoutMismatch
from pdtransfer.peers import PeerKey, key_of
from pdtransfer.plan import Strategy, check_pages
from pdtransfer.plan.cost import Rates, Setting, choose, load_of
from pdtransfer.session.api import EndpointConfig
from pdtransfer.session.digests import undigestible
from pdtransfer.session.frames import MAX_PAGES, MAX_POOL_PAGES, MAX_POOLS, PoolPages, Request
from pdtransfer.session.pairs import Pair, Pairs
from pdtransfer.session.receives import Leg
from pdtransfer.session.strategy import refused, slot_bytes
from pdtransfer.session.wiring import Wiring

CORES = len(os.sched_getaffinity(0))
CHOICES = 1024
"""Choices kept a pair: requests of the same shape are decided once."""


class Opener:
    """Makes the legs of a receive."""

    def __init__(self, config: EndpointConfig, wiring: Wiring, pairs: Pairs) -> None:
        self._config = config
        self._wiring = wiring
        self._pairs = pairs
        self._serials = itertools.count(1)

    def legs(
        self,
        room: int,
        attempt: int,
        sources: Sequence[RankCard],
        pages: Sequence[int],
        first_page: int,
        tokens: int,
        memory: MemoryKind | None,
        pools: Mapping[str, Sequence[int]],
    ) -> dict[PeerKey, Leg]:
        """One leg a source. Raises LayoutMismatch or StaleRegistration and names what is wrong."""
        mine = self._wiring.card
        size = mine.layout.page_tokens
        for name in pools:
            if len(pools[name]) > MAX_POOL_PAGES:
                told = f"pools[{name!r}]: {len(pools[name])} pages, {MAX_POOL_PAGES} may be"
                raise LayoutMismatch(told, room=room)
        if len(pools) > MAX_POOLS:
            raise LayoutMismatch(f"pools: {len(pools)} page lists in one request, {MAX_POOLS} may be", room=room)
        if (asked := len(pages) + sum(map(len, pools.values()))) > MAX_PAGES:
            raise LayoutMismatch(f"{asked} pages in one request, {MAX_PAGES} may be", room=room)
        numbers = tuple(int(p) for p in pages)
        check_pages(mine.layout, numbers, "decode", memory=memory)
        if first_page < 0 or first_page + len(numbers) != -(-tokens // size):
            raise LayoutMismatch(f"{len(numbers)} pages from page {first_page} do not hold {tokens} tokens", room=room)
        lists = tuple(PoolPages(pool=n, pages=tuple(int(p) for p in pools[n])) for n in sorted(pools))
        for held in lists:
            check_pages(mine.layout, held.pages, "decode", pool=held.pool, memory=memory)
        counts = {held.pool: len(held.pages) for held in lists}
        serial = next(self._serials)
        rates = self._rates(sources)
        legs = {}
        for card in sources:
            pair = self._pairs.get(card, None, memory)
            gap = undigestible(pair.plan) if self._config.digest else None
            if gap is not None:
                raise LayoutMismatch(f"digest: {gap}", room=room)
            missing = pair.plan.pools - {"", *counts}
            if missing:
                raise LayoutMismatch(f"pools: no page list for {sorted(missing)[0]!r}", room=room)
            request = Request(
                room=room,
                attempt=attempt,
                source=card.incarnation,
                destination=mine.incarnation,
                serial=serial,
                pages=numbers,
                first_page=first_page,
                tokens=tokens,
                required=self._pairs.askers(card),
                strategy=self._strategy(card, pair, len(numbers), counts, len(sources), rates),
                memory=pair.memories[1],
                pools=lists,
                digest=self._config.digest,
            )
            legs[key_of(card)] = Leg(card, request, pair, pair.plan.nbytes(len(numbers), counts))
        return legs

    def _rates(self, sources: Sequence[RankCard]) -> Rates:
        """Of one source for all: a probe is noisy, and the parts of one request had better go one way. The
        one whose wire has the middle rate for bytes."""
        peers = (self._wiring.peers.get(key_of(card)) for card in sources)
        known = sorted((p.rates for p in peers if p and p.rates), key=lambda rates: rates.wire.source_byte)
        return known[len(known) // 2] if known else Rates()

    def _strategy(
        self, card: RankCard, pair: Pair, pages: int, counts: Mapping[str, int], sources: int, rates: Rates
    ) -> Strategy:
        """The configured strategy, or the cheapest one by the cost rule."""
        mine, plan = self._wiring.card, pair.plan
        forced = self._config.strategy
        if not plan.choosing or (forced == "sliced" and not plan.unequal):
            return "direct"
        if forced != "auto":
            why = refused(forced, plan, card, mine)
            if why is not None:
                raise LayoutMismatch(f"strategy {forced}: {why}", peer=card.pod_name)
            return forced
        key = (pages, tuple(sorted(counts.items())), sources, rates, card.staging, mine.staging)
        held = pair.choices.get(key)
        if held is None:
            if len(pair.choices) >= CHOICES:
                pair.choices.clear()
            held = pair.choices[key] = self._cheapest(card, pair, pages, counts, sources, rates)
        return held

    def _cheapest(
        self, card: RankCard, pair: Pair, pages: int, counts: Mapping[str, int], sources: int, rates: Rates
    ) -> Strategy:
        mine, plan = self._wiring.card, pair.plan
        of_source = min(slot_bytes("split", lane, card, mine) for lane in plan.choosing)
        of_destination = min(slot_bytes("merge", lane, card, mine) for lane in plan.choosing)
        load = load_of(plan, pages, counts, min(of_source, of_destination) or max(of_source, of_destination))
        at, other = card.layout.coordinates, mine.layout.coordinates
        setting = Setting(
            sources=sources,
            askers=self._pairs.askers(card),
            pairs=max(at.tp_size, other.tp_size),
            cores=CORES,
            same_host=_host(card.control) == _host(mine.control),
        )
        choice = choose(plan, load, setting, rates, source_slot=of_source, destination_slot=of_destination)
        return choice.strategy


def _host(address: str) -> str:
    return address.rpartition(":")[0]
