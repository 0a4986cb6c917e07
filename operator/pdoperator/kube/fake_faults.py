"""Faults of the in-memory API server: refusals, silence, slowness, and the end of the operator's process. For tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdoperator.kube.port import KubeError


class Crash(BaseException):
    """The injected end of the operator process (no `except Exception` may survive it)."""


@dataclass
class Faults:
    """What goes wrong. `forbidden`: (verb, resource) answered 403. `broken`: answered 500.
    `drop`: no answer at all. `delay`: seconds per call. `crash_after`: Crash once that many writes
    were stored (0: before the first one is answered)."""

    forbidden: set[tuple[str, str]] = field(default_factory=set)
    broken: set[tuple[str, str]] = field(default_factory=set)
    drop: set[tuple[str, str]] = field(default_factory=set)
    delay: float = 0.0
    crash_after: int | None = None
    crashed: bool = False
    """Set by the crash: the dead process can not write any more. The test clears it to start the next."""

    def alive(self) -> None:
        """Raises Crash once the process is dead."""
        if self.crashed:
            raise Crash("the process is dead")

    def answer(self, verb: str, resource: str) -> None:
        """Raises the KubeError that this call gets instead of an answer, if it gets one."""
        call = (verb, resource)
        if call in self.drop or ("*", "*") in self.drop:
            raise KubeError(0, "Unreachable", f"{verb} {resource}: no answer")
        if call in self.forbidden:
            said = f'{resource} is forbidden: User "operator" cannot {verb} resource "{resource}"'
            raise KubeError(403, "Forbidden", said)
        if call in self.broken:
            raise KubeError(500, "InternalError", f"{verb} {resource}: etcdserver: request timed out")

    def stored(self, writes: int, what: str) -> None:
        """`writes` were stored by now, `what` is the last one. Raises Crash when that is the moment."""
        if self.crash_after is not None and writes >= self.crash_after:
            self.crash_after = None
            self.crashed = True
            raise Crash(f"after write {writes}: {what}")
