"""Turns that end by themselves: few take one at once, and who is held up keeps nobody waiting for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """`count` at once, each for `seconds` at most; whoever takes longer goes on without a turn. At most `most`
    go on in all, with a turn or without one."""

    def __init__(self, count: int, seconds: float, most: int) -> None:
        self._turns = asyncio.Semaphore(count)
        self._all = asyncio.Semaphore(most)
        self._seconds = seconds

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it."""
        async with self._all:
            await self._turns.acquire()
            ended = False

            def end() -> None:
                nonlocal ended
                if not ended:
                    ended = True
                    self._turns.release()

            timer = asyncio.get_running_loop().call_later(self._seconds, end)
            try:
                yield
            finally:
                timer.cancel()
                end()
