"""What the sidecar client and the router client share: bounded bodies and a reading of errors."""

from __future__ import annotations

import ssl

import httpx


class BodyTooLarge(Exception):
    """The peer sent more than the caller is willing to hold."""


def origin(scheme: str, address: str, port: int) -> str:
    """URL of a pod address; IPv6 gets its brackets."""
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


async def read_limited(response: httpx.Response, limit: int) -> bytes:
    """Body of a streamed response, at most `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"answer is larger than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def certificate_problem(error: BaseException) -> str | None:
    """The TLS refusal behind an httpx error, or None when the error is about reaching the peer.

    A handshake that is cut off (EOF, reset) proves nothing about certificates and stays None."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, ssl.SSLCertVerificationError):
            return f"the pod's certificate was refused: {at.verify_message or at.reason}"
        if isinstance(at, ssl.SSLError) and not isinstance(at, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            reason = at.reason or str(at)
            if "ALERT" in reason.upper():
                return f"the pod refused the operator's certificate: {reason}"
            if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
                return f"the pod does not speak TLS on its control port: {reason}"
        at = at.__cause__ or at.__context__
    return None
