"""The leader's engine loop: one thread between the HTTP side, the pure scheduler and the ranks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from pdtransfer.engines.reference.messages import (
    Drain,
    Introduce,
    RankDraining,
    RankFailed,
    RankReady,
    StepDone,
    TransferUpdate,
)
from pdtransfer.engines.reference.options import Options
from pdtransfer.engines.reference.problems import RequestError, SetupError
from pdtransfer.engines.reference.ranks import RankGroup
from pdtransfer.engines.reference.requests import Asked, Output
from pdtransfer.engines.reference.scheduler import Scheduler
from pdtransfer.engines.reference.wake import Wake

if TYPE_CHECKING:
    from pdtransfer.contract.card import RankCard

log = logging.getLogger(__name__)
IDLE_S = 1.0
STALL_S = 30.0
Sink = Callable[[Output], None]


class Engine:
    """Takes requests from any thread; every `Output` goes to the sink given with its request."""

    def __init__(self, options: Options, ranks: RankGroup, on_crash: Callable[[str], None]) -> None:
        self._options = options
        self._ranks = ranks
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = Wake()
        self._sinks: dict[str, Sink] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._beat = time.monotonic()
        ready = _await_ready(ranks, options.load_timeout)
        self.facts = tuple(r.facts for r in ready)
        self.cards = tuple(r.card for r in ready if r.card is not None)
        self.prepare: Callable[[Asked], Awaitable[None]] | None = None
        """Awaited by the HTTP side before a request is submitted."""
        self._scheduler = Scheduler(options, min(f.pages for f in self.facts))
        self.draining = False
        self._stopping = False
        self._ranks_drain = False
        self.failed = ""

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """The loop lives and turns. A long step is no stall: it runs in the ranks."""
        return not self.failed and self._thread.is_alive() and time.monotonic() - self._beat < STALL_S

    @property
    def load(self) -> dict[str, int]:
        """Counts for /get_load and the drain. Read without a lock: each is one attribute."""
        scheduler = self._scheduler
        return {
            "num_reqs": scheduler.live,
            "num_waiting_reqs": scheduler.queued,
            "num_held_reqs": scheduler.held,
            "pages_free": scheduler.allocator.available,
            "pages_total": scheduler.allocator.total,
        }

    def submit(self, asked: Asked, sink: Sink) -> None:
        """Queue a request; refusals come through the sink too."""
        if self.failed:
            sink(Output(asked.rid, error=RequestError("EngineDied", self.failed, 500)))
            return

        def take() -> None:
            if asked.rid in self._sinks:
                sink(Output(asked.rid, error=RequestError("DuplicateRequest", f"rid {asked.rid} is running", 400)))
                return
            self._sinks[asked.rid] = sink
            self._scheduler.add(asked, time.monotonic())

        self._post(take)

    def cancel(self, rid: str, reason: str) -> None:
        """Give a request up; its pages return when the transfer allows it."""
        self._post(lambda: self._scheduler.cancel(rid, RequestError("Aborted", reason, 499)))

    def introduce(self, cards: Sequence[RankCard]) -> None:
        """Tell the ranks a peer pod's cards, before any request that is submitted later."""
        self._post(lambda: self._ranks.send(Introduce(tuple(cards))))

    def drain(self) -> None:
        """Refuse new requests at once; new transfers once no request that was taken still needs one."""
        self.draining = True
        self._wake.set()

    def stop(self) -> None:
        """End the loop, before the ranks are told to end."""
        self._stopping = True
        self._wake.set()
        self._thread.join(IDLE_S)

    def fail(self, text: str) -> None:
        """Fail what is open: the engine is about to end."""
        self.failed = text
        for rid, sink in list(self._sinks.items()):
            sink(Output(rid, error=RequestError("EngineDied", text, 500)))

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self.failed and not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("the engine loop ends")
            self._on_crash(f"engine loop: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        now = time.monotonic()
        self._beat = now
        deadline = self._scheduler.next_deadline()
        timeout = IDLE_S if deadline is None else min(max(deadline - now, 0.0), IDLE_S)
        for woken in wait([*self._ranks.connections, self._wake.fileno()], timeout):
            if isinstance(woken, Connection):
                self._read(woken)
        self._wake.clear()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
        self._scheduler.plan(time.monotonic())
        while self._scheduler.commands:
            self._ranks.send(self._scheduler.commands.popleft())
        while self._scheduler.outputs:
            self._deliver(self._scheduler.outputs.popleft())
        age = self._scheduler.step_age(time.monotonic())
        if age > self._options.step_timeout:
            # No request that runs has a deadline of its own: without this one it would wait for ever.
            self._on_crash(f"a rank is stuck: a step takes over {self._options.step_timeout:g} s")
        if self.draining and not self._ranks_drain and not self._scheduler.queued:
            self._ranks_drain = True
            self._ranks.send(Drain())

    def _read(self, connection: Connection[object, object]) -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._on_crash("a rank closed its pipe")
            return
        match message:
            case StepDone():
                self._scheduler.step_done(message.number, message.sampled, time.monotonic())
            case TransferUpdate():
                self._scheduler.transfer_update(message)
            case RankDraining():
                if not self.draining:
                    log.info("the sidecar told rank %d to drain: taking no new requests", message.rank)
                self.draining = True
            case RankFailed():
                self._on_crash(f"rank {message.rank} failed:\n{message.text}")

    def _deliver(self, output: Output) -> None:
        ended = output.finish is not None or output.error is not None
        sink = self._sinks.pop(output.rid, None) if ended else self._sinks.get(output.rid)
        if sink is not None:
            sink(output)


def _await_ready(ranks: RankGroup, timeout: float) -> tuple[RankReady, ...]:
    """First message of every rank once all have loaded; SetupError names what kept one from it."""
    deadline = time.monotonic() + timeout
    ready: dict[int, RankReady] = {}
    while len(ready) < len(ranks.connections):
        left = deadline - time.monotonic()
        if left <= 0:
            raise RuntimeError(f"{len(ready)} of {len(ranks.connections)} ranks loaded within {timeout:g} s")
        for connection in wait(ranks.connections, left):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except (EOFError, OSError):
                raise RuntimeError("a rank died while loading; its log says why") from None
            if isinstance(message, RankFailed):
                raise (SetupError if message.setup else RuntimeError)(message.text)
            if isinstance(message, RankReady):
                ready[message.rank] = message
    return tuple(ready[rank] for rank in sorted(ready))
