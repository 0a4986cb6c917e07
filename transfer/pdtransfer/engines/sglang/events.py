"""Ready events of a chunk, as the endpoint awaits them: before a byte is posted or packed."""

from __future__ import annotations

import time
from typing import Any

STEP_S = 0.0005


class Ready:
    """The chunk's bytes are in the pool already."""

    def wait(self, timeout: float) -> bool:
        """True at once."""
        return True


class After:
    """The bytes are there once a CUDA event of the engine has happened (or anything else with `query()`).

    Under overlap scheduling an earlier forward pass may still be writing the pages that SGLang hands over."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout: float) -> bool:
        """Host-side; `timeout` in seconds, 0 to look once."""
        until = time.monotonic() + timeout
        while not self._event.query():
            if time.monotonic() >= until:
                return False
            time.sleep(STEP_S)
        return True


def ready_event(event: Any) -> Ready | After:
    """What to await for an event that SGLang passed, or None."""
    return Ready() if event is None else After(event)
