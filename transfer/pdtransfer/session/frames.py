"""Frames of the rank-to-rank control channel: a 4-byte big-endian length, then one JSON object.

Every frame about a request carries its whole identity (room, attempt, both incarnations); a frame
that does not decode ends the connection. Frames are bounded, so a peer can't fill our memory.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import first_agent
from pdtransfer.session.api import Identity

MAX_FRAME = 4 << 20
MAX_HELLO = 64 << 10
"""Bytes; before the peer is known, less is read from it."""
MAX_PAGES = 1 << 18
"""Pages of one request, over all page spaces: with at most 13 digits each, its frame stays below MAX_FRAME."""
MAX_METADATA = 1 << 20
"""Bytes of a prefill's metadata."""
MAX_POOLS = 16
MAX_POOL_PAGES = 1 << 16
"""Other page spaces of one request, and pages in one of them."""
MAX_TEXT = 4096
"""Characters of a reason or message: they quote what engines say."""
HEADER = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are no frame."""


def _cut(text: Any) -> Any:
    return text[:MAX_TEXT].encode(errors="replace").decode() if isinstance(text, str) else text


Text = Annotated[str, BeforeValidator(_cut)]
"""For people: cut to MAX_TEXT, without what UTF-8 can not say."""


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Hello(_Frame):
    """First frame of the dialling side: who it is and whom it means."""

    t: Literal["hello"] = "hello"
    cluster_uid: str
    pod_uid: str
    incarnation: str
    rank: int
    agent_name: str
    generation: int = Field(default=0, ge=0, lt=1 << 31)
    layout_hash: str
    to_pod_uid: str
    to_incarnation: str
    to_rank: int

    @property
    def first_agent(self) -> str:
        """Name of the incarnation's first agent."""
        return first_agent(self.agent_name, self.generation)


class Welcome(_Frame):
    """The accepting side is whom the dialling side means, and its roster names the other."""

    t: Literal["welcome"] = "welcome"
    pod_uid: str
    incarnation: str
    rank: int
    agent_name: str


class Refused(_Frame):
    """The connection is not wanted; it ends after this frame. `drained`: the answering rank is the
    one that was meant, has nothing in flight to the dialling agent, and will post nothing to it."""

    t: Literal["refused"] = "refused"
    reason: Text
    message: Text = ""
    drained: bool = False


class _Identified(_Frame):
    room: int
    attempt: int = Field(ge=0)
    source: str
    destination: str

    @property
    def identity(self) -> Identity:
        """The four parts as one value."""
        return Identity(self.room, self.attempt, self.source, self.destination)

    @property
    def ids(self) -> dict[str, Any]:
        """The four parts as keywords of another frame."""
        return {
            "room": self.room,
            "attempt": self.attempt,
            "source": self.source,
            "destination": self.destination,
        }


class PoolPages(_Frame):
    """Pages in one other page space (`Region.pool`): the whole list, matched by position."""

    pool: str
    pages: tuple[Annotated[int, Field(ge=0, lt=1 << 40)], ...] = Field(max_length=MAX_POOL_PAGES)


class Request(_Identified):
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
    """How slices of unequal TP travel; equal slices always go as whole pages. Decode chooses: it
    knows which of its pages a late write could hit."""
    memory: MemoryKind | None = None
    """Where the pages lie, when this rank registered a layer in both memory kinds."""
    generation: int = Field(default=0, ge=0, lt=1 << 31)
    """The decode rank's agent that is to be written to: another one would not be what fences it."""
    pools: tuple[PoolPages, ...] = Field(default=(), max_length=MAX_POOLS)
    """Pages in other page spaces than the KV pages'."""
    digest: bool = False
    """Done shall carry a digest of the request's bytes."""


class SlotsWanted(_Identified):
    """The source has packed bytes to place: `total` slots over the whole leg so far (never less than
    before; a repeat is harmless)."""

    t: Literal["slots_wanted"] = "slots_wanted"
    arena: MemoryKind
    total: int = Field(ge=0, lt=1 << 40)


class SlotGrant(_Identified):
    """One slot of an arena of decode's card is lent to this leg until it is filled and emptied.
    `ticket` is unique in the decode incarnation."""

    t: Literal["slot_grant"] = "slot_grant"
    arena: MemoryKind
    slot: int = Field(ge=0)
    ticket: int = Field(ge=0)


class SlotFilled(_Identified):
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


class Started(_Identified):
    """Bytes of a chunk are being written; moves the decode's deadline on."""

    t: Literal["started"] = "started"


class Done(_Identified):
    """Every byte is in place and every handle is done. `metadata` is base64."""

    t: Literal["done"] = "done"
    nbytes: int = Field(ge=0)
    metadata: str = ""
    digest: str = ""
    """Of the request's bytes in lane order (session/digests.py), when decode asked for it."""


class Failed(_Identified):
    """The source gave up. `settled`: no write of it can land any more (else AbortAck follows)."""

    t: Literal["failed"] = "failed"
    reason: Text
    message: Text = ""
    nbytes: int = 0
    settled: bool = False


class Abort(_Identified):
    """Decode gives up; answered by AbortAck once every handle of the source has settled."""

    t: Literal["abort"] = "abort"
    reason: Text = ""


class AbortAck(_Identified):
    """No write of this identity can land, now or later."""

    t: Literal["abort_ack"] = "abort_ack"


class Rotated(_Frame):
    """The sender took a new agent: requests of `generation` are for it. `oldest` is the first generation
    that still exists: nothing that was posted to an older one can land, nor will. Sent on each
    connection before anything else of a sender that ever rotated, at the change, and when the older
    agents are gone. `metadata` is base64, `metadata_hash` as on the card."""

    t: Literal["rotated"] = "rotated"
    generation: int = Field(gt=0, lt=1 << 31)
    oldest: int = Field(ge=0, lt=1 << 31)
    agent_name: str = Field(max_length=512)
    metadata: str
    metadata_hash: str = Field(max_length=64)


class Moved(_Frame):
    """Answer: that generation's agent is loaded, nothing that was begun to an older one of that sender can
    still succeed, and nothing will be posted to one. (What failed may still be in flight.)"""

    t: Literal["moved"] = "moved"
    generation: int = Field(gt=0, lt=1 << 31)


class Ping(_Frame):
    """Are you there?"""

    t: Literal["ping"] = "ping"


class Pong(_Frame):
    """Yes."""

    t: Literal["pong"] = "pong"


class Sample(_Frame):
    """`nbytes` at the start of one page of the `region`-th region of the peer's card."""

    region: int = Field(ge=0)
    page: int = Field(ge=0)
    nbytes: int = Field(gt=0)


class ProbeOpen(_Frame):
    """Ask the peer to hash these samples of its pool and to lend a piece of scratch."""

    t: Literal["probe_open"] = "probe_open"
    seq: int
    samples: tuple[Sample, ...] = Field(max_length=64)


class ProbeGrant(_Frame):
    """Scratch at `address`, `nbytes` long (0: none free, try later), and digests of the samples."""

    t: Literal["probe_grant"] = "probe_grant"
    seq: int
    address: int = 0
    nbytes: int = 0
    digests: tuple[str, ...] = ()


class ProbeHash(_Frame):
    """Hash the samples again (they may have changed while they were read)."""

    t: Literal["probe_hash"] = "probe_hash"
    seq: int


class ProbeDigests(_Frame):
    """Answer of ProbeHash."""

    t: Literal["probe_digests"] = "probe_digests"
    seq: int
    digests: tuple[str, ...]


class ProbeCheck(_Frame):
    """Hash the lent scratch."""

    t: Literal["probe_check"] = "probe_check"
    seq: int


class ProbeChecked(_Frame):
    """Answer of ProbeCheck."""

    t: Literal["probe_checked"] = "probe_checked"
    seq: int
    digest: str


class ProbeClose(_Frame):
    """The scratch is not needed any more; `settled` tells that no write into it is in flight."""

    t: Literal["probe_close"] = "probe_close"
    seq: int
    settled: bool = True


RequestFrame = Request | SlotsWanted | SlotGrant | SlotFilled | Started | Done | Failed | Abort | AbortAck
ProbeFrame = ProbeOpen | ProbeGrant | ProbeHash | ProbeDigests | ProbeCheck | ProbeChecked | ProbeClose
RotationFrame = Rotated | Moved
Frame = Hello | Welcome | Refused | Ping | Pong | RotationFrame | RequestFrame | ProbeFrame
_frames: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="t")])


def encode(frame: BaseModel) -> bytes:
    """Length and JSON of a frame."""
    body = frame.model_dump_json().encode()
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes is over the bound of {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame of a body without its length."""
    try:
        return _frames.validate_json(body)
    except ValidationError as error:
        raise FrameError(f"not a frame: {error.errors(include_url=False, include_input=False)[:3]}") from error
