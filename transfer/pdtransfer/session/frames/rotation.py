"""A decode rank takes a new agent, and its peers follow."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdtransfer.session.frames.base import BareFrame


class Rotated(BareFrame):
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


class Moved(BareFrame):
    """Answer: that generation's agent is loaded, nothing that was begun to an older one of that sender can
    still succeed, and nothing will be posted to one. (What failed may still be in flight.)"""

    t: Literal["moved"] = "moved"
    generation: int = Field(gt=0, lt=1 << 31)
