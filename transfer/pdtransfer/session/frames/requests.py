"""One decode rank's request to one prefill rank, and how it goes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdtransfer.contract.base import MemoryKind
from pdtransfer.session.frames.base import BareFrame, Identified, Text

MAX_PAGES = 1 << 18
"""Pages of one request, over all page spaces: with at most 13 digits each, its frame stays below MAX_FRAME."""
MAX_METADATA = 1 << 20
"""Bytes of a prefill's metadata."""
MAX_POOLS = 16
MAX_POOL_PAGES = 1 << 16
"""Other page spaces of one request, and pages in one of them."""


class PoolPages(BareFrame):
    """Pages in one other page space (`Region.pool`): the whole list, matched by position."""

    pool: str
    pages: tuple[Annotated[int, Field(ge=0, lt=1 << 40)], ...] = Field(max_length=MAX_POOL_PAGES)


class Request(Identified):
    """Decode asks one prefill rank for prompt pages `first_page ..`, into its own `pages`.
    `required` is how many decode ranks ask this prefill rank for the room. `serial` differs between
    two requests of one decode incarnation: one that is repeated after a reconnect is told from
    another one under the same identity."""

    t: Literal["request"] = "request"
    serial: int = 0
    pages: tuple[Annotated[int, Field(ge=0, lt=1 << 40)], ...] = Field(max_length=MAX_PAGES)
    first_page: int = Field(ge=0)
    tokens: int = Field(ge=0)
    required: int = Field(gt=0)
    strategy: Literal["direct", "sliced", "staged", "merge", "split"] = "sliced"
    """How unequal slices and small pages travel; larger pages of equal slices always go as they are. Decode chooses: it
    knows which of its pages a late write could hit."""
    memory: MemoryKind | None = None
    """Where the pages lie, when this rank registered a layer in both memory kinds."""
    generation: int = Field(default=0, ge=0, lt=1 << 31)
    """The decode rank's agent that is to be written to: another one would not be what fences it."""
    pools: tuple[PoolPages, ...] = Field(default=(), max_length=MAX_POOLS)
    """Pages in other page spaces than the KV pages'."""
    digest: bool = False
    """Done shall carry a digest of the request's bytes."""


class Started(Identified):
    """Bytes of a chunk are being written; moves the decode's deadline on."""

    t: Literal["started"] = "started"


class Done(Identified):
    """Every byte is in place and every handle is done. `metadata` is base64."""

    t: Literal["done"] = "done"
    nbytes: int = Field(ge=0)
    metadata: str = ""
    digest: str = ""
    """Of the request's bytes in lane order (session/digests.py), when decode asked for it."""


class Failed(Identified):
    """The source gave up. `settled`: no write of it can land any more (else AbortAck follows)."""

    t: Literal["failed"] = "failed"
    reason: Text
    message: Text = ""
    nbytes: int = 0
    settled: bool = False


class Abort(Identified):
    """Decode gives up; answered by AbortAck once every handle of the source has settled."""

    t: Literal["abort"] = "abort"
    reason: Text = ""


class AbortAck(Identified):
    """No write of this identity can land, now or later."""

    t: Literal["abort_ack"] = "abort_ack"
