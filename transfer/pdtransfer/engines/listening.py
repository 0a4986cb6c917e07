"""Where an engine's rank listens for its peers."""

from __future__ import annotations


def listen_host(advertised: str) -> str:
    """All addresses of the advertised family; loopback stays on loopback."""
    if advertised in ("127.0.0.1", "::1", "localhost"):
        return advertised
    return "::" if ":" in advertised else "0.0.0.0"
