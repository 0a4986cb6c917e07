"""An event loop of virtual time that never waits, and stand-ins for the modules that would wait."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

EPOCH = 1_000_000.0
"""Seconds at which virtual time starts: a float at or above it is a moment, one below is a duration."""
MAX_TURNS = 2_000
_MISSING = object()


class _NoSelector:
    """Nothing ever arrives from outside."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is due and stops; `now` is moved by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.now = EPOCH
        self._selector = _NoSelector()
        self.errors: list[BaseException] = []
        self.set_exception_handler(self._note)
        self.set_task_factory(_quiet_task)

    def __del__(self) -> None:
        """Coroutines of a world that was thrown away may end later: it never closes."""

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note(self, _: Any, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))

    @property
    def due(self) -> bool:
        """Something can run without time passing."""
        if self._ready:  # type: ignore[attr-defined]
            return True
        timers = self._scheduled  # type: ignore[attr-defined]
        return any(t.when() <= self.now and not t.cancelled() for t in timers) if timers else False

    @property
    def timers(self) -> list[float]:
        """Moments at which something is due."""
        return [t.when() for t in self._scheduled if not t.cancelled()]  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Run until nothing is due."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(MAX_TURNS):
                if not self.due:
                    return
                self._run_once()  # type: ignore[attr-defined]
            raise RuntimeError("the loop never comes to rest")
        finally:
            asyncio._set_running_loop(before)


def _quiet_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # worlds are thrown away
    return task


class Standin:
    """A module with some names replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        self.__dict__[name] = found
        return found


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, and set them back at the end."""
    held = [(target, name, target.__dict__.get(name, _MISSING)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(held):
            if value is _MISSING:
                delattr(target, name)  # a class inherits it again
            else:
                setattr(target, name, value)


@functools.cache
def _clock_readers() -> tuple[Any, ...]:
    return tuple(
        m for n, m in list(sys.modules.items()) if n.startswith("pdtransfer.") and m.__dict__.get("time") is time
    )


def clock_changes(now: Callable[[], float]) -> list[tuple[Any, str, Any]]:
    """Every module of the transfer package that reads the clock reads `now` instead."""

    def refuse(seconds: float) -> None:
        raise RuntimeError("nothing may sleep here")

    clock = Standin(time, monotonic=now, time=now, perf_counter=now, sleep=refuse)
    return [(module, "time", clock) for module in _clock_readers()]


def numbered_uuids() -> Standin:
    """`uuid` whose names count up, so that a replay meets the same ones."""
    import uuid

    numbers = itertools.count(1)

    class Named:
        def __init__(self) -> None:
            self.hex = f"{next(numbers):04d}"

        def __str__(self) -> str:
            return self.hex

    return Standin(uuid, uuid4=Named)
