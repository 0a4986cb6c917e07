"""Blocking work in a thread of its own, awaited from an event loop.

Not asyncio's executor: its threads are joined at the interpreter's exit, so that one call that hangs
would keep the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def apart(action: Callable[[], T], name: str) -> T:
    """The result of `action`, or what it raised. When the waiting is cancelled, the thread goes on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        try:
            told: tuple[T | None, BaseException | None] = (action(), None)
        except BaseException as error:
            told = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
