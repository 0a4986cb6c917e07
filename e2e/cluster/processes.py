"""Starts the cluster's processes and ends exactly those.

Each process is recorded by its pid and its start time (field 22 of
/proc/PID/stat), so that a pid which the kernel has given to someone else is
never signalled. Every process also carries the cluster's marker in its
environment, which its children inherit: that's how leftovers are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ClusterError
from .paths import Layout

MARKER = "PDCLUSTER_CLUSTER_STATE"
_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessRecord:
    name: str
    pid: int
    start: int

    def alive(self) -> bool:
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a live process; None for no process or a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return parse_start_time(text)


def parse_start_time(stat: str) -> int | None:
    # The command's name may hold spaces and parentheses: fields count from its end.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def children(pid: int) -> list[int]:
    try:
        text = (_PROC / str(pid) / "task" / str(pid) / "children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def all_pids() -> Iterator[int]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def marked(layout: Layout) -> list[int]:
    """Live processes that carry this cluster's marker (not this process itself)."""
    wanted = f"{MARKER}={layout.root}".encode()
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if wanted in environment and pid != os.getpid() and start_time(pid) is not None:
                found.append(pid)
    return found


class Processes:
    """The recorded processes of one cluster."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def record(self, name: str) -> ProcessRecord | None:
        try:
            return ProcessRecord(**json.loads(self._file(name).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def records(self) -> list[ProcessRecord]:
        names = sorted(path.stem for path in self._layout.processes.glob("*.json"))
        return [record for name in names if (record := self.record(name)) is not None]

    def alive(self, name: str) -> bool:
        record = self.record(name)
        return record is not None and record.alive()

    def pid(self, name: str) -> int:
        record = self.record(name)
        if record is None or not record.alive():
            raise ClusterError(
                f"{name} doesn't run",
                hint="run `python3 -m e2e.cluster up` again",
                log=self._layout.log(name),
            )
        return record.pid

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ProcessRecord:
        """Starts a process in a session of its own that outlives the caller."""
        self._layout.processes.mkdir(parents=True, exist_ok=True)
        self._layout.logs.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **(environment or {}), MARKER: str(self._layout.root)}
        with self._layout.log(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=variables,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        # Not reaped here on purpose: the pid can't be given away while it's our child.
        start = start_time(process.pid)
        if start is None:
            raise ClusterError(
                f"{name} ended at once (exit status {process.wait()})",
                log=self._layout.log(name),
            )
        record = ProcessRecord(name, process.pid, start)
        temporary = self._file(name).with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(self._file(name))
        return record

    def ensure(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> bool:
        """Starts a process unless it runs; True where it was started."""
        if self.alive(name):
            return False
        self.start(name, command, environment=environment)
        return True

    def kill_all(self, deadline_s: float = 20.0) -> list[int]:
        """Ends every recorded process and all they started; returns what is left."""
        records = self.records()
        # The nodes first: with a node's init goes everything in its pid namespace.
        for record in sorted(records, key=lambda each: not each.name.startswith("node-")):
            kill(record)
        deadline = time.monotonic() + deadline_s
        while True:
            _reap()
            left = marked(self._layout)
            left += [record.pid for record in records if record.alive()]
            if not left or time.monotonic() > deadline:
                return sorted(set(left))
            for pid in left:
                start = start_time(pid)
                if start is not None:
                    kill(ProcessRecord("leftover", pid, start))
            time.sleep(0.05)

    def _file(self, name: str) -> Path:
        return self._layout.processes / f"{name}.json"


def kill(record: ProcessRecord) -> None:
    """SIGKILL through a pid file descriptor, which can't come to mean another process."""
    try:
        descriptor = os.pidfd_open(record.pid)
    except OSError:
        return
    try:
        if record.alive():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
