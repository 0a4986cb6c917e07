"""Threads that do not die silently: whatever ends one is logged and told to whoever has to know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def watched(name: str, work: Callable[[], None], on_death: Callable[[str], None]) -> threading.Thread:
    """A started daemon thread. `work` returns when it is told to stop; if it raises, `on_death` hears why.

    What concerns one message or one peer is handled inside `work`: only its own fault ends it."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            log.critical("thread %s ended by an error", name, exc_info=True)
            on_death(f"thread {name} ended: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
