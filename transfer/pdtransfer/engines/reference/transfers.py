"""A rank's open transfers: carries out the leader's transfer messages and reports what changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pdtransfer.engines.reference.messages import (
    AbortTransfer,
    Receive,
    SendFinish,
    SendOpen,
    TransferUpdate,
)
from pdtransfer.errors import TransferError
from pdtransfer.session.api import Endpoint, Receiver, Sender, TransferState

log = logging.getLogger(__name__)
TERMINAL = (TransferState.SUCCESS, TransferState.FAILED)


class Computed:
    """Ready event of a chunk: on a CPU the forward pass has returned, so the bytes are there."""

    def wait(self, timeout: float) -> bool:
        """True at once."""
        return True


@dataclass
class _Open:
    transfer: Sender | Receiver
    shown: tuple[TransferState, bool] | None = None


class RankTransfers:
    """Maps request ids to senders and receivers of this rank's endpoint."""

    def __init__(self, rank: int, endpoint: Endpoint | None) -> None:
        self._rank = rank
        self._endpoint = endpoint
        self._open: dict[str, _Open] = {}
        self._failed: list[TransferUpdate] = []

    @property
    def active(self) -> int:
        """Transfers that are not both terminal and releasable, and failures not yet reported."""
        return len(self._open) + len(self._failed)

    def handle(self, message: SendOpen | SendFinish | Receive | AbortTransfer) -> None:
        """Carry out one message; a refusal becomes a failed update, never an exception."""
        try:
            self._handle(message)
        except Exception as error:
            log.warning("transfer of request %s refused: %s", message.rid, error)
            opened = self._open.pop(message.rid, None)
            if opened is not None:
                opened.transfer.abort(f"the rank's own error: {error}")
                self._open[message.rid] = opened
            else:
                self._failed.append(_update(self._rank, message.rid, TransferState.FAILED, True, error))

    def _handle(self, message: SendOpen | SendFinish | Receive | AbortTransfer) -> None:
        if self._endpoint is None:
            raise TransferError("this engine is not disaggregated")
        match message:
            case SendOpen():
                sender = self._endpoint.send(room=message.room, tokens=message.tokens)
                self._open[message.rid] = _Open(sender)
            case Receive():
                receiver = self._endpoint.receive(
                    room=message.room,
                    attempt=message.attempt,
                    bootstrap=message.bootstrap,
                    pages=message.pages,
                    tokens=message.tokens,
                )
                self._open[message.rid] = _Open(receiver)
            case SendFinish():
                opened = self._open.get(message.rid)
                if opened is not None and opened.transfer.state not in TERMINAL:
                    opened.transfer.finish(message.metadata)  # type: ignore[union-attr]
            case AbortTransfer():
                opened = self._open.get(message.rid)
                if opened is not None and opened.transfer.state not in TERMINAL:
                    opened.transfer.abort(message.reason)

    def chunk(self, rid: str, pages: Sequence[int], first_page: int) -> None:
        """Hand finished pages to the request's sender (if it is still open)."""
        opened = self._open.get(rid)
        if opened is not None and opened.transfer.state not in TERMINAL:
            opened.transfer.chunk(pages, first_page, Computed())  # type: ignore[union-attr]

    def poll(self) -> list[TransferUpdate]:
        """Updates since the last call. A transfer that is terminal and releasable is forgotten."""
        updates, self._failed = self._failed, []
        for rid, opened in list(self._open.items()):
            transfer = opened.transfer
            state = transfer.state
            # A sender has no late writes of its own: what it posted was posted for a settled state.
            releasable = state in TERMINAL and bool(getattr(transfer, "pages_releasable", True))
            if opened.shown == (state, releasable):
                continue
            opened.shown = (state, releasable)
            metadata = getattr(transfer, "metadata", None) if state is TransferState.SUCCESS else None
            updates.append(_update(self._rank, rid, state, releasable, transfer.error, metadata))
            if releasable:
                del self._open[rid]
        return updates


def _update(
    rank: int,
    rid: str,
    state: TransferState,
    releasable: bool,
    error: Exception | None,
    metadata: bytes | None = None,
) -> TransferUpdate:
    reason = error.reason if isinstance(error, TransferError) else type(error).__name__ if error else ""
    message = str(error).removeprefix(f"{reason}: ") if error else ""
    return TransferUpdate(rank, rid, state, releasable, reason, message, metadata)
