"""What stands in for parts of a rank that are slow or random and decide nothing here: probes, measured
rates, metrics, fresh arenas, threads."""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pdtransfer.contract import card as card_module
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.layout import RankLayout
from pdtransfer.mover import executor as executor_module
from pdtransfer.peers import refusal
from pdtransfer.plan import PairPlan, pair_plan
from pdtransfer.session import core as core_module
from pdtransfer.session import deaths as deaths_module
from pdtransfer.session import depot as depot_module
from pdtransfer.session import endpoint as endpoint_module
from pdtransfer.session import pairs as pairs_module
from pdtransfer.session import rotation as rotation_module
from pdtransfer.session import wiring as wiring_module
from pdtransfer.session.scratch import Scratch
from pdtransfer.staging.arena import Arena
from pdtransfer.staging.copier import Copier

from .virtual import Standin, clock_changes, numbered_uuids

if TYPE_CHECKING:
    from .world import World

POISON = 0xEE
"""What lies in memory that nobody wrote since the engine gave it to a transfer."""


_scratch = Scratch(1)


class NoProber:
    """Probes never end; they have tests of their own."""

    def __init__(self, *_: Any) -> None:
        self.scratch = _scratch

    async def probe(self, peer: Any) -> Any:
        await asyncio.Event().wait()

    def on_disconnected(self, peer: Any) -> None: ...
    def on_frame(self, peer: Any, frame: Any) -> None: ...
    def forget(self, peer: Any) -> None: ...


class Tally:
    """Instead of the metrics: what was counted, by name, whatever its labels."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1, **labels: object) -> None:
        self.counts[name.removesuffix("_total")] += int(amount)

    def gauge(self, name: str, value: float, **labels: object) -> None: ...
    def observe(self, name: str, value: float, **labels: object) -> None: ...
    def snapshot(self) -> dict[str, Any]:
        return {}


class Arenas:
    """Staging arenas of a world, the n-th one always the same memory; each has its copier."""

    _kept: ClassVar[dict[tuple[int, int, int], Arena]] = {}
    _copiers: ClassVar[dict[Arena, Copier]] = {}

    def __init__(self) -> None:
        self._made = 0
        self.all: list[Arena] = []

    def arena(self, kind: MemoryKind, nbytes: int, slot_bytes: int, *, device: int = 0) -> Arena:
        self._made += 1
        key = (self._made, nbytes, slot_bytes)
        if key not in self._kept:
            self._kept[key] = Arena(kind, nbytes, slot_bytes, device=device)
        arena = self._kept[key]
        ctypes.memset(arena.address, POISON, arena.nbytes)
        self.all.append(arena)
        return arena

    def copier(self, arena: Arena) -> Copier:
        if arena not in self._copiers:
            self._copiers[arena] = Copier(arena)
        return self._copiers[arena]

    def read(self) -> tuple[bytes, ...]:
        """What lies in them."""
        return tuple([ctypes.string_at(a.address, a.nbytes) for a in self.all])


async def at_once(action: Callable[[], Any], name: str) -> Any:
    """Instead of a thread."""
    return action()


def _nothing(*_: Any) -> None:
    """Nothing is measured here."""


@cache
def _pair_plan(source: RankLayout, destination: RankLayout, **memory: Any) -> PairPlan:
    return pair_plan(source, destination, **memory)


_pair_fingerprint = cache(card_module.pair_fingerprint)
_layout_fingerprint = cache(card_module.layout_fingerprint)
_refusals: dict[tuple[tuple[str, str, bool, bool], ...], tuple[str, str] | None] = {}


def _refusal(mine: RankCard, peer: RankCard) -> tuple[str, str] | None:
    """The real judgement, once for two incarnations: it takes longer than a path."""
    pair = tuple([(c.incarnation, c.layout_hash, bool(c.staging), bool(c.process)) for c in (mine, peer)])
    if pair not in _refusals:
        _refusals[pair] = refusal(mine, peer)
    return _refusals[pair]


def changes(world: World) -> list[tuple[Any, str, Any]]:
    """What is replaced in the package while a world is used."""
    from .ranks import SteppedCore

    core = type("WorldCore", (SteppedCore,), {"world": world})
    return [
        *clock_changes(world.loop.time),
        *world.network.changes(),
        (core_module, "asyncio", Standin(asyncio, new_event_loop=lambda: world.loop)),
        (wiring_module, "Prober", NoProber),
        (wiring_module, "refusal", _refusal),
        (card_module, "pair_fingerprint", _pair_fingerprint),
        (card_module, "layout_fingerprint", _layout_fingerprint),
        (executor_module, "post", world.post),
        (endpoint_module, "Core", core),
        (endpoint_module, "usable_hcas", tuple),
        (endpoint_module, "uuid", numbered_uuids()),
        (endpoint_module, "copy_rates", _nothing),
        (endpoint_module, "Gauges", _nothing),
        (core_module, "Metrics", Tally),
        (pairs_module, "pair_plan", _pair_plan),
        (depot_module, "Arena", world.arenas.arena),
        (depot_module, "Copier", world.arenas.copier),
        (rotation_module, "apart", at_once),
        (deaths_module, "is_dead", world.is_dead),
        (wiring_module, "is_dead", world.is_dead),
    ]
