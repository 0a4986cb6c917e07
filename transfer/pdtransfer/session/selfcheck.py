"""Is this rank's own agent broken, or its peers? Asked when transfers to peers fail in NIXL one after the other.

A peer that is gone costs its own requests and is loaded anew. An agent that can not even move bytes from this
rank to itself serves nobody: then the endpoint fails, and the engine with it.
"""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from pdtransfer.agent.port import AgentFailure, Handle, HandleState, Indices, Prepared
from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import AgentError, DeadlineExceeded, TransferError
from pdtransfer.session.core import Core
from pdtransfer.session.scratch import Scratch

logger = logging.getLogger(__name__)

FAILURES = 3
"""Transfers in a row that NIXL failed, after which the agent is tried."""
EVERY = 5.0
"""Seconds between two tries, at least."""
BYTES = 4096
TRIES = 3
"""Posts within one try: NIXL may refuse one and take the next; an agent that moves nothing refuses each."""
PAUSE = 0.01
"""Seconds between them."""


class SelfCheck:
    """Runs in the core's thread."""

    def __init__(self, core: Core, scratch: Scratch) -> None:
        self._core = core
        self._scratch = scratch
        self._failures = 0
        self._tried_at = float("-inf")

    def moved(self) -> None:
        """A transfer to a peer succeeded."""
        self._failures = 0

    def failed(self) -> None:
        """NIXL failed one."""
        self._failures += 1
        now = time.monotonic()
        if self._failures >= FAILURES and now - self._tried_at > EVERY:
            self._tried_at = now
            self._core.spawn_contained(self._try(), "self-check")

    async def _try(self) -> None:
        taken = [self._scratch.take(), self._scratch.take()]
        source, target = taken
        try:
            if source is None or target is None:
                return  # probes have it all: the agent moves something
            await self._loop(source, target)
        except TransferError as error:
            taken = []  # the copy may still go on
            told = f"it moves nothing any more, not even from this rank to itself: {error.message}"
            self._core.crash(AgentError(told, peer=self._core.name))
        finally:
            for address in taken:
                if address is not None:
                    self._scratch.give(address)
        self._failures = 0

    async def _loop(self, source: int, target: int) -> None:
        agent, one = self._core.agent, np.zeros(1, dtype=np.int32)
        block = np.random.default_rng().bytes(BYTES)
        self._scratch.write(source, block)
        local = agent.prepare(None, np.array([[source, BYTES, 0]], dtype=np.uint64), MemoryKind.DRAM)
        remote = agent.prepare(agent.name, np.array([[target, BYTES, 0]], dtype=np.uint64), MemoryKind.DRAM)
        handle = await self._post(local, remote, one)
        until = time.monotonic() + self._core.timeouts.probe
        while agent.poll(handle) is not HandleState.DONE:
            if time.monotonic() > until:
                raise DeadlineExceeded("a copy within this rank did not end")
            agent.progress()
            await asyncio.sleep(0.001)
        agent.release(handle)
        for prepared in (local, remote):
            agent.release_prepared(prepared)
        if self._scratch.read(target, BYTES) != block:
            raise AgentFailure("nixlUnknownError", "a copy within this rank arrived changed", posted=True)

    async def _post(self, local: Prepared, remote: Prepared, one: Indices) -> Handle:
        """Post a copy. A refused post started nothing, so it can be tried again."""
        for left in range(TRIES - 1, 0, -1):
            try:
                return self._core.agent.post("WRITE", local, one, remote, one)
            except AgentFailure as failure:
                if failure.posted:
                    raise
                logger.warning(
                    "%s: a copy within this rank was refused, %d tries left: %s", self._core.name, left, failure
                )
            await asyncio.sleep(PAUSE)
        return self._core.agent.post("WRITE", local, one, remote, one)
