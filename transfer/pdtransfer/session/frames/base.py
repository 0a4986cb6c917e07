"""What all frames share: text that is cut, and the identity of one attempt to move one request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pdtransfer.session.api import Identity

MAX_TEXT = 4096
"""Characters of a reason or message: they quote what engines say."""


def _cut(text: Any) -> Any:
    return text[:MAX_TEXT].encode(errors="replace").decode() if isinstance(text, str) else text


Text = Annotated[str, BeforeValidator(_cut)]
"""For people: cut to MAX_TEXT, without what UTF-8 can not say."""


class BareFrame(BaseModel):
    """Base of every frame. Fields that are not known are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Identified(BareFrame):
    """Base of frames about a request."""

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
