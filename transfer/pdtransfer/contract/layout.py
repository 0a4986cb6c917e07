"""What one engine rank really registered with NIXL: its regions, pages, heads and coordinates.

Region and item sizes are bytes; pages hold `page_tokens` tokens. Inside a page the order is
token, head, dim (NHD), so that the slice of one token and a run of heads is contiguous.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from pdtransfer.contract.base import ContractModel, MemoryKind


class RegionKind(StrEnum):
    """What a region stores. LATENT is MLA's joint row (one copy for all ranks)."""

    KEY = "K"
    VALUE = "V"
    LATENT = "LATENT"
    INDEX = "INDEX"
    STATE = "STATE"


class Region(ContractModel):
    """One contiguous registered buffer of a paged pool.

    `address` and `device` are where it lies in that process; `item_bytes` is the size of one
    page of this region and `items` the number of pages. `memory` is None when the peer did not
    say: such a card is stale (the fault `Missing NIXL destination KV memory kind`).
    """

    layer: int = Field(ge=0)
    kind: RegionKind
    item_bytes: int = Field(gt=0, lt=1 << 48)
    items: int = Field(gt=0, lt=1 << 48)
    memory: MemoryKind | None = None
    device: int = Field(default=0, ge=0, lt=1 << 32)
    address: int = Field(default=0, ge=0, lt=1 << 64)
    draft: bool = False
    pool: str = ""
    """Page space that `items` counts in: "" for the KV pages, else a pool with page lists of its own
    (sliding-window pages, Mamba slots)."""

    @property
    def key(self) -> tuple[int, RegionKind, bool]:
        """What must match between two ranks for bytes to go from one region to the other."""
        return (self.layer, self.kind, self.draft)


class HeadSlice(ContractModel):
    """KV heads a rank holds: `first` .. `first + count - 1` of `total` (before replication)."""

    first: int = Field(ge=0)
    count: int = Field(gt=0)
    total: int = Field(gt=0)


class RankCoordinates(ContractModel):
    """Place of a rank in its engine. `tp` counts within attention TP."""

    tp: int = Field(default=0, ge=0)
    tp_size: int = Field(default=1, gt=0)
    pp: int = Field(default=0, ge=0)
    pp_size: int = Field(default=1, gt=0)
    dp: int = Field(default=0, ge=0)
    dp_size: int = Field(default=1, gt=0)
    cp: int = Field(default=0, ge=0)
    cp_size: int = Field(default=1, gt=0)

    @property
    def index(self) -> int:
        """Unique number of the rank within its engine: dp, then pp, then cp, then tp fastest."""
        return ((self.dp * self.pp_size + self.pp) * self.cp_size + self.cp) * self.tp_size + self.tp


class RankLayout(ContractModel):
    """Layout of one rank's KV memory."""

    version: Literal[1] = 1
    page_tokens: int = Field(gt=0)
    kv_dtype: str
    heads: HeadSlice | None = None
    """None for MLA and other rows that do not split by head."""
    coordinates: RankCoordinates = RankCoordinates()
    regions: tuple[Region, ...] = ()
    emulated_vram: bool = False
    """VRAM regions live in host memory (tests without a GPU). Shown wherever a result shows."""

    @property
    def memory_kinds(self) -> frozenset[MemoryKind]:
        """Memory kinds of the regions that name one."""
        return frozenset(r.memory for r in self.regions if r.memory is not None)

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the layers held here, ascending, draft layers not counted."""
        return tuple(sorted({r.layer for r in self.regions if not r.draft}))

    @property
    def stale_reason(self) -> str | None:
        """Why this layout can't be wired yet (no segments, or a region without memory kind)."""
        if not self.regions:
            return "the rank registered no KV memory segments"
        if any(r.memory is None for r in self.regions):
            return "a KV region names no memory kind (VRAM or DRAM)"
        return None
