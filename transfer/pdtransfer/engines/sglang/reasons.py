"""Why a room failed, in the words that SGLang and the other side are told."""

from __future__ import annotations

from pdtransfer.engines.sglang.rows import BadRows
from pdtransfer.errors import TransferError


def reason_of(error: BaseException | None) -> str:
    """The message of an error that is ours, and of any other its type too."""
    return str(error) if isinstance(error, TransferError | BadRows) else repr(error)
