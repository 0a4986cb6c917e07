"""The rank's agents: the present one, and replaced ones until they are destroyed.

A decode rank takes a new agent when pages wait too long for an acknowledgement of a writer (rotation.py):
both hold the same memory meanwhile, both progress, and destroying the old one fences what was posted to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdtransfer.agent.port import AgentFailure, AgentPort
from pdtransfer.errors import TransferError
from pdtransfer.mover.executor import Mover
from pdtransfer.session.api import EndpointConfig


@dataclass(frozen=True, eq=False)
class Generation:
    """One agent of this rank and what posts with it. The first is number 0."""

    number: int
    agent: AgentPort
    mover: Mover

    def destroy(self) -> None:
        """Destroy the agent (any thread; may block for seconds). Raises AgentFailure when it is not
        certain that it is gone."""
        self.agent.close()


class Generations:
    """Runs in the core's thread."""

    present: Generation

    def __init__(self, config: EndpointConfig, landed: Callable[[float], None]) -> None:
        """`landed` hears the seconds of each handle that is done."""
        self._config = config
        self._landed = landed
        self._older: list[Generation] = []
        """Replaced ones that go on."""
        self._leaving: list[Generation] = []
        """Those that are being destroyed."""

    def take(self, agent: AgentPort) -> None:
        """`agent` is the present one from now on; the one before goes on until `retire`."""
        config, number = self._config, 0
        if hasattr(self, "present"):
            number = self.present.number + 1
            self._older.append(self.present)
        mover = Mover(
            agent,
            window_bytes=config.window_bytes,
            window_ops=config.window_ops,
            settle=config.timeouts.settle,
        )
        mover.on_landed = self._landed
        self.present = Generation(number, agent, mover)

    @property
    def oldest(self) -> int:
        """Number of the first one that is not surely destroyed."""
        return min(g.number for g in (*self._leaving, *self._older, self.present))

    @property
    def living(self) -> tuple[Generation, ...]:
        """The present one and those that go on beside it."""
        return (self.present, *self._older)

    @property
    def busy(self) -> bool:
        """Something is queued or in flight."""
        return self.present.mover.busy or any(g.mover.busy for g in self._older)

    @property
    def handles_in_flight(self) -> int:
        """Posted handles that are not done."""
        return sum(g.mover.handles_in_flight for g in self.living)

    def step(self) -> bool:
        """Let every mover post, poll and look at deadlines."""
        moved = self.present.mover.step()
        for older in self._older:
            moved |= older.mover.step()
        return moved

    def progress_older(self) -> int:
        """Let writes to replaced agents go on; how many of them failed to (what they do not move any
        more fails by its deadline)."""
        failed = 0
        for older in self._older:
            try:
                older.agent.progress()
            except AgentFailure:
                failed += 1
        return failed

    def retire(self, error: TransferError) -> tuple[Generation, ...]:
        """Take the replaced ones out of the loop, to be destroyed; their jobs end with `error`."""
        for generation in self._older:
            generation.mover.abandon(error)
        self._leaving += self._older
        self._older = []
        return tuple(self._leaving)

    def destroyed(self, generation: Generation) -> None:
        """It surely is."""
        self._leaving.remove(generation)
        generation.mover.settle_reads()

    def close(self) -> None:
        """Destroy all of them."""
        for generation in self.living:
            generation.destroy()
