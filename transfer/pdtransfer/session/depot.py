"""This rank's staging arenas: one for each memory kind that its pool really has, made at set-up, registered
with every agent the rank takes, told on its card. Prefill packs in them, decode lends their slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdtransfer.agent.port import AgentPort
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard, StagingArena
from pdtransfer.errors import TransferError
from pdtransfer.peers import real_kind
from pdtransfer.plan import RowCopy
from pdtransfer.session.api import EndpointConfig
from pdtransfer.staging.arena import Arena
from pdtransfer.staging.copier import Copier, Fence
from pdtransfer.staging.slots import PackSlots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Store:
    arena: Arena
    copier: Copier
    slots: PackSlots


class Depot:
    """Made once; afterwards only the core's thread uses it."""

    def __init__(self) -> None:
        self._stores: dict[MemoryKind, _Store] = {}

    def build(self, card: RankCard, config: EndpointConfig) -> None:
        """Make the arenas. Where there is no memory or no torch for one, unequal slices of that kind are
        written in place, and a warning says so."""
        if config.staging_bytes <= 0:
            return
        for kind in sorted({real_kind(card, k) for k in card.layout.memory_kinds}):
            devices = {r.device for r in card.layout.regions if r.memory and real_kind(card, r.memory) is kind}
            try:
                if len(devices) > 1:
                    raise TransferError(f"the pool lies on devices {sorted(devices)}, an arena on one")
                arena = Arena(kind, config.staging_bytes, config.staging_slot_bytes, device=min(devices))
                copier = Copier(arena)
                copier.warm()
            except (TransferError, ValueError) as error:
                logger.warning("no staging in %s, unequal slices are written in place: %s", kind, error)
                continue
            self._stores[kind] = _Store(arena, copier, PackSlots(arena.slots))

    @property
    def told(self) -> tuple[StagingArena, ...]:
        """What the card says of them."""
        return tuple(store.arena.told for store in self._stores.values())

    def register(self, agent: AgentPort) -> None:
        """Register them with an agent, so that they can be read and written by it and through it."""
        for kind, store in self._stores.items():
            agent.register(store.arena.descriptors, kind)

    # --- this rank's own use (prefill packs) ------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Slots over all arenas by state: free, granted (one is packed in, or sent)."""
        free = sum(store.slots.free for store in self._stores.values())
        return {"free": free, "granted": sum(store.arena.slots for store in self._stores.values()) - free}

    def take(self, kind: MemoryKind, peer: str) -> int | None:
        """A free slot to pack in for that peer; None: not now."""
        return self._stores[kind].slots.take(peer)

    def give(self, kind: MemoryKind, slot: int) -> None:
        """The slot is free again."""
        self._stores[kind].slots.give(slot)

    # --- copies -----------------------------------------------------------------------------

    def pack(self, rows: Sequence[RowCopy], kind: MemoryKind, slot: int) -> Fence:
        """Rows of the pool into a slot."""
        return self._stores[kind].copier.pack(rows, slot)

    def scatter(self, kind: MemoryKind, slot: int, rows: Sequence[RowCopy]) -> Fence:
        """A slot into rows of the pool."""
        return self._stores[kind].copier.scatter(slot, rows)

    def read(self, kind: MemoryKind, slot: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of a slot, on the host. Waits for a device."""
        return self._stores[kind].copier.read(slot, nbytes)
