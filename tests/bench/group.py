"""The processes of one setup, driven: started, wired, one run after the other, ended."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing as mp
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import rank
from shape import Load, Setup

LEAD = 0.004
"""Seconds between the command and the start: every process is asleep until then."""
_rooms = itertools.count(1)


def context() -> mp.context.ForkServerContext:
    """Rank processes are forked from a server that has imported what they need."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    # The server does not take over sys.path, and passes over in silence what it can not import.
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["rank", "torch", "nixl"])
    return made


class RankFailed(Exception):
    """A rank's process answered with an error, or not at all."""


@dataclass
class Worker:
    """One process and the pipe to it."""

    process: BaseProcess
    pipe: Connection
    name: str

    def tell(self, *command: Any) -> None:
        self.pipe.send(command)

    def answer(self, timeout: float = 120.0) -> Any:
        if not self.pipe.poll(timeout):
            raise RankFailed(f"{self.name} did not answer within {timeout:.0f} s")
        try:
            state, value = self.pipe.recv()
        except EOFError:
            raise RankFailed(f"{self.name} ended (exit code {self.process.exitcode})") from None
        if state == "error":
            raise RankFailed(f"{self.name}: {value}")
        return value


@dataclass
class Result:
    """One run: seconds from the first source's start to the last decode rank's end, by pod too."""

    seconds: float
    by_pod: list[float]
    prefill: list[dict[str, float]] = field(default_factory=list)
    decode: list[dict[str, float]] = field(default_factory=list)


class Group:
    """Rank processes of a setup, prefill first."""

    def __init__(self, made: mp.context.ForkServerContext, setup: Setup, strategies: tuple[str, ...]) -> None:
        self.setup = setup
        specs = [rank.Spec(setup, "prefill", tp) for tp in range(setup.prefill)]
        for pod in range(setup.decode_pods):
            specs += [rank.Spec(setup, "decode", tp, pod, ("auto", *strategies)) for tp in range(setup.decode)]
        self._workers: list[Worker] = []
        self._random = np.random.default_rng(7)
        try:
            for spec in specs:
                near, far = made.Pipe()
                process = made.Process(target=rank.main, args=(spec, far), daemon=True)
                process.start()
                far.close()
                self._workers.append(Worker(process, near, f"{spec.role} {spec.pod}.{spec.tp}"))
            cards = [card for cards in self.everywhere("cards") for card in cards]
            # Each decode rank is a raw target of the first pod only: fairness is about ours.
            fars = self.everywhere("far")[setup.prefill : setup.prefill + setup.decode]
            if not all(self.everywhere("wire", cards, fars)):
                raise RankFailed(f"{setup}: not wired in time")
        except BaseException:
            self.close()
            raise

    @property
    def prefill(self) -> list[Worker]:
        return self._workers[: self.setup.prefill]

    @property
    def decode(self) -> list[Worker]:
        return self._workers[self.setup.prefill :]

    def everywhere(self, *command: Any) -> list[Any]:
        """Every rank's answer to a command, prefill first."""
        for worker in self._workers:
            worker.tell(*command)
        return [worker.answer() for worker in self._workers]

    def job(self, kind: str, load: Load, avoid: Sequence[int] = ()) -> rank.Job:
        """Random pages: disjoint at decode, and at prefill as far as the pool reaches."""
        count = load.pages(self.setup)
        pool = self.setup.pool_pages
        target = self._random.permutation(pool)
        source = self._random.permutation(pool)
        wanted = count * load.concurrent
        if wanted > pool:
            raise ValueError(f"{wanted} pages wanted, {pool} in the pool")
        cut = [slice(i * count, (i + 1) * count) for i in range(load.concurrent)]
        first = next(_rooms) * 1000
        return rank.Job(
            kind,
            load,
            range(first, first + load.concurrent),
            tuple(source[c] for c in cut),
            tuple(target[c] for c in cut),
        )

    def run(self, job: rank.Job, pods: Sequence[int] = (0,)) -> Result:
        """Arm decode, start prefill, wait for all. `pods` with more than one: each takes a share of the rooms."""
        size = self.setup.decode
        jobs: list[tuple[Worker, rank.Job]] = []
        for place, pod in enumerate(pods):
            share = slice(place, None, len(pods))
            mine = dataclasses.replace(job, rooms=job.rooms[share], source=job.source[share], target=job.target[share])
            jobs += [(worker, mine) for worker in self.decode[pod * size : (pod + 1) * size]]
        jobs += [(worker, job) for worker in self.prefill]
        for worker, mine in jobs:
            worker.tell("arm", mine)
        for worker, _ in jobs:
            worker.answer()
        start = time.perf_counter() + LEAD
        for worker, mine in jobs:
            worker.tell("run", dataclasses.replace(mine, start=start))
        outcomes: list[rank.Outcome] = [worker.answer() for worker, _ in jobs]
        errors = [o.error for o in outcomes if o.error]
        if errors:
            raise RankFailed(f"{self.setup} {job.kind} {job.load}: {errors[0]}")
        ends, begins = outcomes[: -self.setup.prefill], outcomes[-self.setup.prefill :]
        began = min(o.began for o in begins)
        by_pod = [max(o.ended for o in ends[i * size : (i + 1) * size]) - began for i in range(len(pods))]
        return Result(max(by_pod), by_pod, [o.counters for o in begins], [o.counters for o in ends])

    def verified(self, kind: str, load: Load, sample: int = 32) -> int:
        """An unmeasured run whose bytes are compared on some pages; how many pages that were."""
        job = self.job(kind, load)
        target, source = job.target[0], job.source[0]
        picked = self._random.permutation(len(target))[:sample]
        for worker in self.decode[: self.setup.decode]:
            worker.tell("forget", target.tolist())
        for worker in self.decode[: self.setup.decode]:
            worker.answer()
        self.run(job)
        for worker in self.decode[: self.setup.decode]:
            worker.tell("wrong", target[picked].tolist(), source[picked].tolist())
        wrong = [worker.answer() for worker in self.decode[: self.setup.decode]]
        if any(wrong):
            raise RankFailed(f"{self.setup} {kind}: {wrong} numbers differ from what prefill holds")
        return len(picked)

    def predicted(self, load: Load) -> dict[str, float]:
        """Seconds by strategy that the cost rule of the first decode engine expects of one request."""
        asked = self.decode[: self.setup.decode]
        for worker in asked:
            worker.tell("predicted", load.tokens)
        answers: list[dict[str, float]] = [worker.answer() for worker in asked]
        return {name: max(a.get(name, 0.0) for a in answers) for name in answers[0]}

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            with suppress(OSError):
                worker.tell("close")
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(5)
            worker.pipe.close()
