"""The endpoint's own thread: event loop, agent, mover and progress; nothing in it dies silently.

Progress is explicit (see agent.nixl): hot while something is in flight, one tick every
`IDLE_TICK` seconds otherwise, so that a rank that idles costs next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from pdtransfer.agent.port import AgentFailure, AgentPort
from pdtransfer.errors import Aborted, DeadlineExceeded, TransferError
from pdtransfer.mover.executor import Mover
from pdtransfer.session.api import EndpointConfig, TransferState
from pdtransfer.session.generations import Generations
from pdtransfer.session.metrics import Metrics
from pdtransfer.session.naps import Napper
from pdtransfer.session.transfers import StateCell

logger = logging.getLogger(__name__)

START_DEADLINE = 600.0
"""Seconds; registering pins the whole pool, which takes long for hundreds of GB."""
IDLE_TICK = 0.05
WARM_TICK = 0.002
"""Seconds between looks at handles whose transfer was given up."""
CHECK_TICK = 0.02
"""Seconds between looks at deadlines; each look runs on caches that a post has just emptied."""
TICK_SHARE = 0.1
"""Part of the time that deadline checks may take: thousands of queued requests are looked at less often."""
BAD_TURNS = 200
"""Progress calls in a row that may fail."""


class Core:
    """Runs the loop thread. Agents and movers are for that thread only.

    `agent` and `mover` are the present generation's: who starts a job keeps the mover it started on."""

    def __init__(self, name: str, config: EndpointConfig, make_agent: Callable[[str], AgentPort]) -> None:
        self.name, self.config, self.timeouts = name, config, config.timeouts
        self.failed: Exception | None = None
        self.metrics = Metrics()
        self.make_agent = make_agent
        """Makes an agent of that name; may take long."""
        self.generations = Generations(config, lambda seconds: self.metrics.observe("handle_seconds", seconds))
        self._loop = asyncio.new_event_loop()
        self._napper = Napper(self._loop)
        self._thread = threading.Thread(target=self._main, name=f"pdtransfer-{name}", daemon=True)
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._hot = 0
        self._bad_turns = 0
        self._turned = time.monotonic()
        self.turns = 0
        """Turns of the loop so far."""
        self.ticks: list[Callable[[float], None]] = []
        self.works: list[Callable[[], bool]] = []
        """Called once a turn; each does at most one piece of work and says whether it did."""
        self.on_stop: list[Callable[[], None]] = []
        self._cells: weakref.WeakSet[StateCell] = weakref.WeakSet()
        self._cells_lock = threading.Lock()
        self._ended: Exception | None = None
        self._listeners: list[Callable[[], None]] = []

    def start(self, setup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the thread, run `setup` in it and wait for its end; raises what it raised."""
        self._setup = setup
        self._thread.start()
        if not self._ready.wait(START_DEADLINE):
            raise DeadlineExceeded(f"the agent and its registrations took over {START_DEADLINE:.0f} s")
        if self.failed is not None:
            raise self.failed

    def stop(self, timeout: float) -> bool:
        """End the thread; False when it did not end within `timeout` seconds."""
        if self._thread.is_alive():
            self.call(self._stop.set)
            self.call(self._wake.set)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)
        return not self._thread.is_alive()

    def call(self, action: Callable[..., Any], *args: Any) -> None:
        """Run `action` in the loop thread soon. After the thread's end it does nothing."""
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(action, *args)
            except RuntimeError:
                logger.debug("%s: the loop closed before a call", self.name)

    def track(self, cell: StateCell) -> None:
        """This transfer fails when the thread ends, whether it was taken up by then or not."""
        with self._cells_lock:
            self._cells.add(cell)
            ended = self._ended
        if ended is not None:
            cell.move(TransferState.FAILED, ended)

    def _end_transfers(self) -> None:
        error = self.failed or TransferError("the endpoint was closed", peer=self.name)
        with self._cells_lock:
            self._ended = error
            cells = list(self._cells)
        for cell in cells:
            cell.move(TransferState.FAILED, error)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Start a task whose unexpected end crashes the endpoint (loudly), never vanishes."""
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def spawn_contained(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task that serves one peer: what breaks it is logged and counted, and costs that
        peer's question only."""

        async def contained() -> None:
            try:
                await work
            except Exception:
                self.count("task_errors_total")
                logger.exception("%s: %s failed", self.name, name)

        task = self.spawn(contained(), name)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it would never be awaited
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.crash(task.exception())

    def crash(self, error: BaseException | None) -> None:
        """Something that must not happen happened: every transfer fails with it."""
        if self.failed is None:
            logger.error("%s: the endpoint failed: %r", self.name, error, exc_info=error)
            self.failed = TransferError(f"the endpoint failed: {error!r}", peer=self.name)
            self.failed.__cause__ = error
        self._stop.set()
        self._wake.set()

    @property
    def age(self) -> float:
        """Seconds since the thread's last turn: large when a call of the agent hangs."""
        return time.monotonic() - self._turned

    @property
    def agent(self) -> AgentPort:
        """The present agent."""
        return self.generations.present.agent

    @property
    def mover(self) -> Mover:
        """The present agent's mover."""
        return self.generations.present.mover

    def hot(self, delta: int) -> None:
        """One more (or less) reason to progress without pause."""
        self._hot += delta
        self._wake.set()

    @property
    def active(self) -> bool:
        """Something moves here or is awaited from a peer."""
        return self._hot > 0 or self.generations.busy

    async def turn(self) -> None:
        """Return after the loop's next turn (progress made, deadlines looked at)."""
        seen = self.turns
        while self.turns == seen:
            self._wake.set()
            await asyncio.sleep(0)

    def wake(self) -> None:
        """Look at the mover now."""
        self._wake.set()

    def count(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a counter of contract/metrics.py."""
        self.metrics.count(name, amount, **labels)

    def ended(self, began: float, strategy: str, error: TransferError | None) -> None:
        """Measure a transfer that began at `began` (monotonic seconds) and ended now."""
        outcome = "succeeded" if error is None else "aborted" if isinstance(error, Aborted) else "failed"
        if error is not None:
            self.count("failures_total", reason=error.reason)
        self.count("transfers_total", strategy=strategy, outcome=outcome)
        self.metrics.observe("transfer_seconds", time.monotonic() - began, strategy=strategy, outcome=outcome)

    def listen(self, callback: Callable[[], None]) -> None:
        """Call back on changes."""
        self._listeners.append(callback)

    def changed(self) -> None:
        """Tell the listeners. One that raises is logged, not obeyed."""
        for callback in list(self._listeners):
            try:
                callback()
            except Exception:
                logger.exception("%s: a change listener failed", self.name)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._napper.sharpen()
        self._loop.set_exception_handler(lambda _, c: self.crash(c.get("exception") or RuntimeError(c["message"])))
        main = self._loop.create_task(self._run(), name="main")
        try:
            self._loop.run_until_complete(main)
        except BaseException as error:
            self.crash(error)
            with contextlib.suppress(BaseException):  # a SystemExit leaves the loop before it closed what it holds
                self._loop.run_until_complete(main)
        finally:
            self._end_transfers()
            if self.failed is not None:
                self.changed()
            self._loop.close()
            self._ready.set()

    async def _run(self) -> None:
        try:
            self.generations.take(self.make_agent(self.name))
            await self._setup()
        except Exception as error:
            self.failed = error
            if hasattr(self.generations, "present"):
                self.generations.close()
            return
        self._ready.set()
        try:
            await self._pump()
        except Exception as error:
            self.crash(error)
        finally:
            self._end_transfers()  # first: nobody has to wait for what follows
            for stop in self.on_stop:
                stop()
            # All of the loop's, not only `_tasks`: the listener makes tasks of its own.
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.generations.close()

    def _progress(self) -> None:
        failed = self.generations.progress_older()
        if failed:
            self.count("progress_errors_total", failed)
        try:
            notes = self.agent.progress()
        except AgentFailure as error:
            # A peer's end may show here; only an agent that never works again is our own end.
            self.count("progress_errors_total")
            self._bad_turns += 1
            if self._bad_turns == 1:
                logger.warning("%s: progress failed: %s", self.name, error)
            if self._bad_turns > BAD_TURNS:
                raise
            return
        self._bad_turns = 0
        if notes:
            self.count("notifications_total", len(notes))

    async def _pump(self) -> None:
        quiet, next_tick = 0, 0.0
        while not self._stop.is_set():
            moved, worked = self.generations.step(), False
            for work in self.works:
                worked |= work()
            if worked:
                moved |= self.generations.step()  # what was packed just now goes out in the same turn
            self._progress()
            now = self._turned = time.monotonic()
            self.turns += 1
            if now > next_tick:
                for tick in self.ticks:
                    tick(now)
                next_tick = now + max(CHECK_TICK, (time.monotonic() - now) / TICK_SHARE)
            quiet = 0 if moved or worked else quiet + 1
            if not quiet or self.active:  # what moved may have made room for more
                self._napper.pace(quiet)
                await asyncio.sleep(0)
            else:
                self._wake.clear()
                pause = WARM_TICK if self.generations.handles_in_flight else IDLE_TICK
                timer = self._loop.call_later(pause, self._wake.set)
                await self._wake.wait()
                timer.cancel()
                quiet = 0
