"""Keeps the roster over a restart of the sidecar container, in the pod's emptyDir.

Without it a sidecar that restarts while the operator is away would turn a wired pod unready. Whoever
can write the file sits in the same pod, beside the NIXL agent itself, so it needs no seal.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from pdtransfer.contract.roster import Roster
from pdtransfer.sidecar.model import Identity, PodState
from pdtransfer.sidecar.state import restored

log = logging.getLogger(__name__)


class StateFile:
    """Roster and drain mark of one pod in one file; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self, identity: Identity) -> PodState:
        """State to start from. What can't be read is logged and forgotten: the operator writes again."""
        if self._path is None:
            return PodState(identity=identity)
        try:
            data = json.loads(self._path.read_bytes())
            if data["pod_uid"] != identity.pod_uid:
                return PodState(identity=identity)
            roster = None if data["roster"] is None else Roster.model_validate(data["roster"])
            draining = data["draining"] is True
        except FileNotFoundError:
            return PodState(identity=identity)
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as e:
            log.warning("kept roster is unreadable and ignored path=%s error=%s", self._path, type(e).__name__)
            return PodState(identity=identity)
        state = restored(identity, roster, roster.hash if roster else "", draining)
        if state.roster is not None:
            log.info(
                "kept roster loaded incarnation=%s term=%d counter=%d",
                state.incarnation,
                state.key.term,
                state.key.counter,
            )
        return state

    def save(self, state: PodState) -> None:
        """Write atomically; a failure is logged (the roster is still in force, only not kept)."""
        if self._path is None:
            return
        roster = state.roster.model_dump_json() if state.roster is not None else "null"
        text = (
            f'{{"pod_uid": {json.dumps(state.identity.pod_uid)}, '
            f'"draining": {json.dumps(state.draining)}, "roster": {roster}}}'
        )
        tmp = self._path.with_name(self._path.name + ".new")
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w") as f:
                f.write(text)
            tmp.replace(self._path)
        except OSError as e:
            log.warning("roster could not be kept path=%s error=%s", self._path, e)
