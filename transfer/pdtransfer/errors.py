"""The transfer module's one error tree. Each names the room, the peer and what was done so far."""

from __future__ import annotations

from typing import Self


class TransferError(Exception):
    """Base of all. `reason` is the machine-readable word used in logs, verdicts and HTTP bodies."""

    reason = "TransferError"

    def __init__(
        self,
        message: str,
        *,
        room: int | None = None,
        peer: str = "",
        rank: int | None = None,
        bytes_done: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.room = room
        self.peer = peer
        self.rank = rank
        self.bytes_done = bytes_done

    def about(self, *, room: int | None = None, peer: str = "", bytes_done: int = 0) -> Self:
        """A copy that names one transfer: an error that ends several must not be shared by them."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        made.room = self.room if room is None else room
        made.peer = peer or self.peer
        made.bytes_done = bytes_done or self.bytes_done
        made.__cause__ = self.__cause__
        return made

    def __str__(self) -> str:
        where = [
            f"room {self.room}" if self.room is not None else "",
            f"peer {self.peer}" if self.peer else "",
            f"rank {self.rank}" if self.rank is not None else "",
            f"{self.bytes_done} bytes done" if self.bytes_done else "",
        ]
        tail = ", ".join(w for w in where if w)
        return f"{self.reason}: {self.message}" + (f" ({tail})" if tail else "")


class BadInput(TransferError, ValueError):
    """An argument of the engine's call makes no sense; the message begins with its name. Nothing was begun."""

    reason = "BadInput"


class PeerNotRostered(TransferError):
    """The request names a peer that no roster wires to this rank."""

    reason = "PeerNotRostered"


class PeerReplaced(TransferError):
    """The peer is now another incarnation."""

    reason = "PeerReplaced"


class PeerUnreachable(TransferError):
    """The peer does not answer, or its connection ended."""

    reason = "PeerUnreachable"


class LayoutMismatch(TransferError):
    """The two layouts can not be mapped, or a page list lies outside the pool."""

    reason = "LayoutMismatch"


class StaleRegistration(LayoutMismatch):
    """The peer's card names no segments or no memory kinds."""

    reason = "StaleRegistration"


class DeadlineExceeded(TransferError):
    """A state's deadline passed."""

    reason = "DeadlineExceeded"


class Aborted(TransferError):
    """One side gave up on purpose."""

    reason = "Aborted"


class RoomTaken(TransferError):
    """Another decode engine gets this room's KV."""

    reason = "RoomTaken"


class ChecksumMismatch(TransferError):
    """Bytes arrived that are not the bytes that were sent."""

    reason = "ChecksumMismatch"


class Draining(TransferError):
    """This rank takes no new transfers."""

    reason = "Draining"


class QuarantineOverflow(TransferError):
    """More memory waits for writers that can not be fenced than may: only this process' end fences them."""

    reason = "QuarantineOverflow"


class AgentError(TransferError):
    """NIXL refused or failed; the message carries its class and text."""

    reason = "AgentError"
