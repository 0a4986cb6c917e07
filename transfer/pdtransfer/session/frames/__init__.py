"""Frames of the rank-to-rank control channel: a 4-byte big-endian length, then one JSON object.

Every frame about a request carries its whole identity (room, attempt, both incarnations); a frame
that does not decode ends the connection. Frames are bounded, so a peer can't fill our memory.
"""

from __future__ import annotations

import struct
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pdtransfer.session.frames.hello import (
    Hello,
    Ping,
    Pong,
    Refused,
    Welcome,
)
from pdtransfer.session.frames.probes import (
    ProbeCheck,
    ProbeChecked,
    ProbeClose,
    ProbeDigests,
    ProbeGrant,
    ProbeHash,
    ProbeOpen,
    Sample,
)
from pdtransfer.session.frames.requests import (
    MAX_METADATA,
    MAX_PAGES,
    MAX_POOL_PAGES,
    MAX_POOLS,
    Abort,
    AbortAck,
    Done,
    Failed,
    PoolPages,
    Request,
    Started,
)
from pdtransfer.session.frames.rotation import (
    Moved,
    Rotated,
)
from pdtransfer.session.frames.slots import (
    SlotFilled,
    SlotGrant,
    SlotsWanted,
)

__all__ = [
    "HEADER",
    "MAX_FRAME",
    "MAX_HELLO",
    "MAX_METADATA",
    "MAX_PAGES",
    "MAX_POOLS",
    "MAX_POOL_PAGES",
    "Abort",
    "AbortAck",
    "Done",
    "Failed",
    "Frame",
    "FrameError",
    "Hello",
    "Moved",
    "Ping",
    "Pong",
    "PoolPages",
    "ProbeCheck",
    "ProbeChecked",
    "ProbeClose",
    "ProbeDigests",
    "ProbeFrame",
    "ProbeGrant",
    "ProbeHash",
    "ProbeOpen",
    "Refused",
    "Request",
    "RequestFrame",
    "Rotated",
    "Sample",
    "SlotFilled",
    "SlotGrant",
    "SlotsWanted",
    "Started",
    "Welcome",
    "decode",
    "encode",
]

MAX_FRAME = 4 << 20
MAX_HELLO = 64 << 10
"""Bytes; before the peer is known, less is read from it."""
HEADER = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are no frame."""


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
