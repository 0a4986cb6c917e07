"""Keeps the roster over a restart of the sidecar container, in the pod's emptyDir.

Without it a sidecar that restarts while the operator is away would turn a wired pod unready. The file
is the operator's body as it came, and is read by the same checks. Whoever can write it sits in the same
pod, beside the NIXL agent itself, so it needs no seal. A second file marks a pod that drains.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pdtransfer.sidecar.model import HeldRoster, Identity, PodState
from pdtransfer.sidecar.rosters import BadRoster, parse
from pdtransfer.sidecar.state import restored

log = logging.getLogger(__name__)


class StateFile:
    """Roster and drain mark of one pod; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self, identity: Identity) -> PodState:
        """State to start from. What can't be read is logged and forgotten: the operator writes again."""
        if self._path is None:
            return PodState(identity=identity)
        body, mark = self._read(self._path), self._read(self._mark)
        roster: HeldRoster | None = None
        if body is not None:
            try:
                roster = parse(body)
            except BadRoster as e:
                log.warning("kept roster can not be used path=%s error=%s", self._path, e)
        state = restored(identity, roster, mark is not None and mark.decode(errors="replace") == identity.pod_uid)
        if state.roster is not None:
            key = state.key
            log.info("kept roster loaded incarnation=%s term=%d counter=%d", state.incarnation, key.term, key.counter)
        return state

    def save_roster(self, body: bytes | bytearray) -> None:
        """Keep the roster that was just taken, as its body."""
        if self._path is not None:
            self._write(self._path, body)

    def save_drain(self, identity: Identity) -> None:
        """Keep that this pod drains."""
        if self._path is not None:
            self._write(self._mark, identity.pod_uid.encode())

    @property
    def _mark(self) -> Path:
        assert self._path is not None
        return self._path.with_suffix(".draining")

    @staticmethod
    def _read(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            log.warning("kept state can not be read path=%s error=%s", path, e)
            return None

    @staticmethod
    def _write(path: Path, data: bytes | bytearray) -> None:
        """Write atomically; a failure is logged (what it says is still in force, only not kept)."""
        tmp = path.with_name(path.name + ".new")
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as f:
                f.write(data)
            tmp.replace(path)
        except OSError as e:
            log.warning("state could not be kept path=%s error=%s", path, e)
