"""Decode's first contacts with prefill engines: each in a thread apart from the scheduler, its outcome kept.

An engine that is not reachable yet is tried again by the next one who asks; a refusal stands for a while, so that
requests for it fail at once and by name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from pdtransfer.engines.sglang.registry import NotOurs, NotReachable, Registry
from pdtransfer.errors import TransferError

log = logging.getLogger(__name__)
WORKERS = 4
MAX_TROUBLES = 1024
REFUSED_S = 5.0
"""How long a refusal stands before the address is looked at again."""


@dataclass(frozen=True)
class Outcome:
    """Met (a registry), or refused for a reason."""

    registry: Registry | None = None
    refusal: str = ""
    at: float = field(default_factory=time.monotonic)


class Meetings:
    """`meet(address)` returns the registry, or raises NotReachable (try again) or why the engine is refused."""

    def __init__(self, meet: Callable[[str], Registry]) -> None:
        self._meet = meet
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="pdcluster-meet")
        self._lock = threading.Lock()
        self._running: dict[str, Future[Outcome | None]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._trouble: dict[str, str] = {}

    def met(self, address: str) -> Registry | None:
        """What is known of an engine that was met."""
        outcome = self._outcomes.get(address)
        return outcome.registry if outcome is not None else None

    def trouble(self, address: str) -> str:
        """Why an engine that was asked for was not met yet; empty when it was."""
        return "" if self.met(address) else self._trouble.get(address, "")

    def incarnations(self, address: str) -> str:
        """As its bootstrap server's health names them; empty when it was not met."""
        registry = self.met(address)
        return ",".join(sorted({r.card.incarnation for r in registry.ranks})) if registry is not None else ""

    def outcome(self, address: str, timeout: float) -> Outcome | None:
        """How it went, or None while nothing is known; begins a meeting when there is none. Waits `timeout` s for an
        address nobody asked for yet, else not at all: one that does not answer is asked for again and again."""
        with self._lock:
            held = self._outcomes.get(address)
            if held is not None and (held.registry is not None or time.monotonic() - held.at < REFUSED_S):
                return held
            running = self._running.get(address)
            new = held is None and running is None and address not in self._trouble
            if running is None:
                running = self._running[address] = self._pool.submit(self._run, address)
        try:
            return running.result(timeout if new else 0.0)
        except TimeoutError:
            return None

    def _run(self, address: str) -> Outcome | None:
        outcome: Outcome | None = None
        try:
            outcome = Outcome(registry=self._meet(address))
        except NotReachable as error:
            log.warning("%s", error)
            self._trouble[address] = str(error)
        except (NotOurs, TransferError) as error:
            log.error("the prefill engine at %s is refused: %s", address, error)
            outcome = Outcome(refusal=str(error))
        except Exception as error:
            log.exception("the prefill engine at %s could not be met", address)
            outcome = Outcome(refusal=f"the prefill engine at {address} could not be met: {error!r}")
        finally:
            with self._lock:
                self._running.pop(address, None)
                if outcome is not None:
                    self._outcomes[address] = outcome
                    self._trouble.pop(address, None)
                while len(self._trouble) > MAX_TROUBLES:  # addresses come from requests
                    del self._trouble[next(iter(self._trouble))]
                while len(self._outcomes) > MAX_TROUBLES:
                    del self._outcomes[next(iter(self._outcomes))]
        return outcome

    def registries(self) -> list[Registry]:
        """Of all engines that were met."""
        with self._lock:
            return [o.registry for o in self._outcomes.values() if o.registry is not None]

    def forget(self, address: str) -> None:
        """The next one who asks meets it anew."""
        with self._lock:
            self._outcomes.pop(address, None)

    def close(self) -> None:
        """No more meetings."""
        self._pool.shutdown(wait=False, cancel_futures=True)
