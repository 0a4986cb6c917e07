"""What a decode rank tells prefill ranks beside the control channel, over SGLang's ZMQ socket: who it is (where no
operator introduces the two), that a rank is in a request's group but has nothing to send, and that a request it
may be waiting for will not come.

None of it makes a byte move. What can not be read is dropped with a warning: the socket is open to anyone.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pdtransfer.contract.base import ContractModel
from pdtransfer.contract.card import RankCard
from pdtransfer.session.frames.base import Text

GUARD = b"pdcluster-1"
MAX_BYTES = 64 << 20


class Introduce(ContractModel):
    """The decode rank's card. Without one: an operator's roster names it."""

    type: Literal["introduce"] = "introduce"
    card: RankCard | None = None


class Note(ContractModel):
    """This rank is one of the request's prefill group and sends nothing: another one has the same rows. It needs
    to know, so that all ranks of the group go on together. `first_page` is the first prompt page decode wants."""

    type: Literal["note"] = "note"
    room: int
    attempt: int = Field(ge=0)
    first_page: int = Field(ge=0)
    source: str = Field(min_length=1)
    """Incarnation that the note is for; another one drops it."""
    destination: str = ""
    """Decode's incarnation: attempts are its count."""


class GiveUp(ContractModel):
    """Nothing will be asked for the room any more."""

    type: Literal["give_up"] = "give_up"
    room: int
    attempt: int = Field(ge=0)
    reason: Text = ""
    source: str = Field(min_length=1)
    destination: str = ""


Message = Annotated[Introduce | Note | GiveUp, Field(discriminator="type")]
_adapter: TypeAdapter[Message] = TypeAdapter(Message)


class BadMessage(ValueError):
    """A message that is not one of ours."""


def encode(message: Introduce | Note | GiveUp) -> list[bytes]:
    """ZMQ frames."""
    return [GUARD, message.model_dump_json().encode()]


def decode(frames: list[bytes]) -> Introduce | Note | GiveUp:
    """The message in ZMQ frames. Raises BadMessage."""
    if len(frames) != 2 or frames[0] != GUARD:
        raise BadMessage(f"{len(frames)} frames that begin with {bytes(frames[0][:16])!r}" if frames else "no frame")
    if len(frames[1]) > MAX_BYTES:
        raise BadMessage(f"{len(frames[1])} bytes, {MAX_BYTES} may be")
    try:
        return _adapter.validate_json(frames[1])
    except ValidationError as error:
        first = error.errors()[0]
        raise BadMessage(f"{'.'.join(map(str, first['loc'])) or 'message'}: {first['msg']}") from None
