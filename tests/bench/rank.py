"""One rank's process: our endpoints and the raw rival over the same pool, told what to do over a pipe.

A prefill rank has one endpoint; a decode rank has one for each strategy that is measured, since decode chooses. Times
are `time.perf_counter()`, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from pool import BOOTSTRAP, Pool
from raw import Far, Kind, Raw, handles, timer_slack
from shape import Load, Setup
from stamps import STEPS, Stamp, stamped

import pdtransfer.session.opening as opening
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of
from pdtransfer.plan.cost import Choice
from pdtransfer.session.api import EndpointConfig, ReadyEvent
from pdtransfer.session.endpoint import RankEndpoint

DEADLINE = 60.0
SLACK_NS = 50_000
"""Linux's default."""


class Ready:
    """The bytes are there."""

    def wait(self, timeout: float) -> bool:
        return True


READY: ReadyEvent = Ready()


@dataclass(frozen=True)
class Spec:
    """Which rank this is. `strategies` are decode's endpoints."""

    setup: Setup
    role: str
    tp: int
    pod: int = 0
    strategies: tuple[str, ...] = ("auto",)


@dataclass(frozen=True)
class Job:
    """One measured run: the same page lists on all ranks of a role, one list a request."""

    kind: str
    """A strategy of ours, or `raw-bulk`, `raw-natural`."""
    load: Load
    rooms: range
    source: tuple[npt.NDArray[np.int64], ...]
    target: tuple[npt.NDArray[np.int64], ...]
    start: float = 0.0


@dataclass
class Outcome:
    """What a rank saw. `began` at prefill, `ended` at decode."""

    began: float = 0.0
    ended: float = 0.0
    error: str = ""
    counters: dict[str, float] = field(default_factory=dict)


def make_config(strategy: str) -> EndpointConfig:
    """As shipped, on loopback, with a strategy forced unless it is `auto`."""
    return EndpointConfig(listen_host="127.0.0.1", net_devices="lo", strategy=strategy)  # type: ignore[arg-type]


_choices: list[Choice] = []
"""What the cost rule answered since the list was cleared."""
_choose = opening.choose


def _recorded(*arguments: Any, **named: Any) -> Choice:
    choice = _choose(*arguments, **named)
    _choices.append(choice)
    return choice


opening.choose = _recorded


class Rank:
    """Serves the commands of the driver."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.pool = Pool(spec.setup, spec.role, spec.tp)
        names = ("prefill",) if spec.role == "prefill" else spec.strategies
        self.endpoints = {
            name: RankEndpoint(
                self.pool.card(f"{spec.role}-{spec.pod}-{name}"),
                self.pool.regions(),
                make_config("auto" if name == "prefill" else name),
            )
            for name in names
        }
        self._predicted: dict[int, dict[str, float]] = {}
        self._stamps: list[Stamp] = []
        self.raw = Raw(self.pool, f"raw-{spec.role}-{spec.pod}-{spec.tp}-{os.getpid()}")

    def cards(self) -> list[RankCard]:
        return [e.card for e in self.endpoints.values()]

    def wire(self, cards: Sequence[RankCard], targets: list[Far]) -> bool:
        """Our endpoints to all others, the raw source to the raw targets."""
        for endpoint in self.endpoints.values():
            endpoint.apply_peers(peers_of(endpoint.card, cards))
        if self.spec.role == "prefill":
            self.raw.connect(targets)
        return all(e.wait_wired(30) for e in self.endpoints.values())

    # --- a run ------------------------------------------------------------------------------

    def arm(self, job: Job) -> None:
        """Decode: ask for the rooms, so that prefill can start at once."""
        if self.spec.role == "decode" and not job.kind.startswith("raw-"):
            endpoint = self.endpoints[job.kind]
            self._before = dict(endpoint.counters)
            _choices.clear()
            self._receivers = [
                endpoint.receive(room=room, attempt=0, bootstrap=BOOTSTRAP, pages=pages, tokens=job.load.tokens)
                for room, pages in zip(job.rooms, (p.tolist() for p in job.target), strict=True)
            ]
            if _choices:  # later requests of this shape are not asked about again
                self._predicted[job.load.tokens] = {
                    name: max(c.seconds.get(name, 0.0) for c in _choices) for name in _choices[0].seconds
                }
        elif self.spec.role == "prefill":
            self._before = dict(self.endpoints["prefill"].counters)

    def run(self, job: Job) -> Outcome:
        """The measured part."""
        if job.kind.startswith("raw-"):
            return self._raw(job)
        return self._send(job) if self.spec.role == "prefill" else self._receive(job)

    def _raw(self, job: Job) -> Outcome:
        kind: Kind = "bulk" if job.kind == "raw-bulk" else "natural"
        setup = self.spec.setup
        source, target = np.concatenate(job.source), np.concatenate(job.target)
        whole = Load(job.load.tokens * job.load.concurrent)
        timer_slack(1)
        try:
            if self.spec.role == "decode":
                sources = setup.parts // setup.decode
                return Outcome(ended=self.raw.receive(sources * handles(setup, kind, whole), job.start + DEADLINE))
            until(job.start)
            began = time.perf_counter()
            self.raw.send(kind, whole, source, target, setup.model.heads // setup.decode)
            return Outcome(began=began)
        finally:
            timer_slack(SLACK_NS)

    def _send(self, job: Job) -> Outcome:
        endpoint = self.endpoints["prefill"]
        lists = [pages.tolist() for pages in job.source]
        until(job.start)
        began = time.perf_counter()
        senders = []
        for room, pages in zip(job.rooms, lists, strict=True):
            sender = endpoint.send(room=room, tokens=job.load.tokens)
            sender.chunk(pages, 0, READY)
            sender.finish(b"")
            senders.append(sender)
        return self._waited(senders, Outcome(began=began), endpoint)

    def _receive(self, job: Job) -> Outcome:
        return self._waited(self._receivers, Outcome(), self.endpoints[job.kind])

    def _waited(self, transfers: Sequence[Any], outcome: Outcome, endpoint: RankEndpoint) -> Outcome:
        states = [str(t.wait(DEADLINE)) for t in transfers]
        outcome.ended = time.perf_counter()
        bad = [f"{t.state}: {t.error}" for t, s in zip(transfers, states, strict=True) if s != "Success"]
        outcome.error = bad[0] if bad else ""
        after = endpoint.counters
        outcome.counters = {k: v - self._before.get(k, 0.0) for k, v in after.items()}
        return outcome

    def predicted(self, tokens: int) -> dict[str, float]:
        """Seconds by strategy that the cost rule expected of a request."""
        return self._predicted.get(tokens, {})

    def forget(self, pages: Sequence[int]) -> None:
        self.pool.forget(pages)

    def wrong(self, pages: Sequence[int], source: Sequence[int]) -> int:
        return self.pool.wrong(pages, source)

    def far(self) -> Far:
        return self.raw.far()

    def stamp(self) -> None:
        """From now on note when requests pass the session's steps (steps.py)."""
        for owner, name in STEPS:
            stamped(owner, name, self._stamps)

    def stamps(self) -> list[Stamp]:
        """What was noted since they were asked for."""
        found = list(self._stamps)
        self._stamps.clear()
        return found

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()


def until(moment: float) -> None:
    """Sleep until shortly before, then yield."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left - 0.0005 if left > 0.001 else 0)


def main(spec: Spec, pipe: Connection) -> None:
    """Answer ("method", arguments) with ("ok", result) or ("error", text) until the pipe ends."""
    os.environ.pop("UCX_TLS", None)
    if spec.setup.transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    rank: Rank | None = None
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            break
        try:
            if rank is None:
                rank = Rank(spec)
            pipe.send(("ok", getattr(rank, what)(*arguments)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
        if what == "close":
            break
    os._exit(0)  # UCX's teardown is not measured
