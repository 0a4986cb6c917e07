"""The steps of a request in the session, and their moments."""

from __future__ import annotations

import time
from typing import Any

from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.session.destination import DestinationSide
from pdtransfer.session.feeder import Feeder
from pdtransfer.session.source import SourceSide
from pdtransfer.session.transfers import StateCell
from pdtransfer.session.wiring import Wiring

Stamp = tuple[str, float]
"""A step's beginning or end, and when it was (seconds, monotonic)."""
STEPS = (
    (SourceSide, "command"),
    (Feeder, "_queue"),
    (NixlAgent, "post"),
    (SourceSide, "_job_finished"),
    (Wiring, "send"),
    (DestinationSide, "on_started"),
    (DestinationSide, "on_done"),
    (StateCell, "move"),
)


def stamped(owner: type, name: str, stamps: list[Stamp]) -> None:
    """From now on note each call of that method in `stamps`."""
    inner = getattr(owner, name)
    short = name.strip("_")

    def outer(*arguments: Any, **named: Any) -> Any:
        stamps.append((f"{short} begins", time.perf_counter()))
        try:
            return inner(*arguments, **named)
        finally:
            stamps.append((f"{short} ends", time.perf_counter()))

    setattr(owner, name, outer)
