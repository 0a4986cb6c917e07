"""Ports of loopback for programs that are told theirs before they start."""

from __future__ import annotations

import random
import socket

LOW, HIGH = 15_000, 29_999
"""Below what Linux gives to outgoing connections (32768 and above): a port from there may be taken by anybody between
its choice here and the program's start, which is seconds later."""
_given: set[int] = set()


def free_port() -> int:
    """A TCP port that nobody listens on and that was not given before."""
    for port in random.SystemRandom().sample(range(LOW, HIGH), 200):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise OSError(f"200 ports of {LOW} to {HIGH} are taken")
