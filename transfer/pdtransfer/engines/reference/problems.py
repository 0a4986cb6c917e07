"""Errors that end the start of the engine (exit code 2) or refuse one request (an HTTP status).

Each text names the thing at fault and what to do about it; nothing else may be raised on purpose.
"""

from __future__ import annotations


class SetupError(Exception):
    """The engine can not start with what it was given. Printed as it is; exit code 2."""


class RequestError(Exception):
    """One request is refused or failed: `reason` is the machine-readable word, `status` HTTP's."""

    def __init__(self, reason: str, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.status = status

    def body(self) -> dict[str, dict[str, str | int]]:
        """The JSON of an error answer."""
        return {"error": {"type": self.reason, "message": self.message, "code": self.status}}


UNAVAILABLE = frozenset({"PeerNotRostered", "PeerUnreachable", "PeerReplaced", "Draining", "QueueTimeout"})
"""Reasons answered with 503: this pod can not serve the request, another may."""


def failed_transfer(reason: str, message: str) -> RequestError:
    """A KV transfer ended without success. 503 when another pod may do better, else 500."""
    return RequestError(reason, message, 503 if reason in UNAVAILABLE else 500)
