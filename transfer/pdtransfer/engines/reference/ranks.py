"""Starts the rank processes and ends the whole group: one rank's death is the engine's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from pdtransfer.engines.reference.messages import Configure, LeaderMessage
from pdtransfer.engines.reference.options import Options

log = logging.getLogger(__name__)
STOP_S = 3.0


class RankGroup:
    """The engine's ranks. `send` tells all of them the same thing in the same order."""

    def __init__(self, options: Options) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdref-", dir=_scratch())
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection[object, object]] = []
        self._stopping = threading.Event()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        for rank in range(options.tp_size):
            ours, theirs = Pipe(duplex=True)
            command = [sys.executable, "-m", "pdtransfer.engines.reference.rank", str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            theirs.close()
            ours.send(Configure(options, rank, Path(self._folder.name) / "meeting"))
            self.connections.append(ours)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids by rank."""
        return [p.pid for p in self._processes]

    def watch(self, on_death: Callable[[int, int], None]) -> None:
        """Call `on_death(rank, exit code)` from a thread when a rank ends before `stop`."""
        for rank, process in enumerate(self._processes):
            threading.Thread(
                target=self._watch, args=(rank, process, on_death), name=f"watch-rank{rank}", daemon=True
            ).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], on_death: Callable[[int, int], None]) -> None:
        code = process.wait()
        if not self._stopping.is_set():
            on_death(rank, code)

    def send(self, message: LeaderMessage) -> None:
        """Tell every rank. A broken pipe is a rank's death, which `watch` reports."""
        for rank, connection in enumerate(self.connections):
            try:
                connection.send(message)
            except OSError as error:
                log.error("rank %d takes no more messages: %s", rank, error)

    def stop(self, message: LeaderMessage | None = None) -> None:
        """End every rank: politely for STOP_S seconds when `message` is given, then by force."""
        self._stopping.set()
        if message is not None:
            self.send(message)
            for process in self._processes:
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    log.warning("pid %d did not end in %.0f s", process.pid, STOP_S)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._folder.cleanup()


def _scratch() -> str | None:
    """Shared memory where there is some: a container's root may be read-only. None: the usual place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
