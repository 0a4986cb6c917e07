"""Who a TLS client is, from its verified certificate (the dict of `ssl.SSLObject.getpeercert`). Pure.

Ranks of a PDCluster hold certificates of the same CA as the operator's client certificate (for the
control channel between ranks), so a valid chain alone must not let anyone write a roster.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peer:
    """Names a verified client certificate carries, and when it expires (Unix seconds)."""

    names: frozenset[str]
    expires: float


def peer_of(certificate: Mapping[str, Any] | None) -> Peer | None:
    """Common name, DNS and URI alternative names of a verified certificate; None without one."""
    if not certificate:
        return None
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")}
    names |= {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    not_after = certificate.get("notAfter")
    expires = float(ssl.cert_time_to_seconds(not_after)) if isinstance(not_after, str) else 0.0
    return Peer(frozenset(names), expires)


def why_not(peer: Peer | None, wanted: str, now: float) -> str:
    """Why this client may not use the control API, empty when it may. Names match exactly."""
    if peer is None:
        return "no client certificate was presented"
    if wanted not in peer.names:
        names = ", ".join(sorted(peer.names)) or "nobody"
        return f"the client certificate names {names}; only {wanted} may use this API"
    if now > peer.expires:
        return "the client certificate has expired since the connection was made"
    return ""
