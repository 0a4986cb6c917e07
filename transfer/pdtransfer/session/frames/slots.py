"""Decode's arena slots: asked for, lent and filled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdtransfer.contract.base import MemoryKind
from pdtransfer.session.frames.base import Identified


class SlotsWanted(Identified):
    """The source has packed bytes to place: `total` slots over the whole leg so far (never less than
    before; a repeat is harmless)."""

    t: Literal["slots_wanted"] = "slots_wanted"
    arena: MemoryKind
    total: int = Field(ge=0, lt=1 << 40)


class SlotGrant(Identified):
    """One slot of an arena of decode's card is lent to this leg until it is filled and emptied.
    `ticket` is unique in the decode incarnation."""

    t: Literal["slot_grant"] = "slot_grant"
    arena: MemoryKind
    slot: int = Field(ge=0)
    ticket: int = Field(ge=0)


class SlotFilled(Identified):
    """The slot's bytes are in place: a block of one plan lane, region by region, page by page (prompt
    pages `first_page ..`), token by token."""

    t: Literal["slot_filled"] = "slot_filled"
    ticket: int = Field(ge=0)
    lane: int = Field(ge=0)
    first_region: int = Field(ge=0)
    regions: int = Field(gt=0)
    first_page: int = Field(ge=0)
    pages: int = Field(gt=0)
    memory: MemoryKind | None = None
    """Where the source's pages lay, when it registered a layer in both kinds (lanes depend on it)."""
