"""The processes of pods, which this machine sees where the cluster is the embedded one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.processes import all_pids


@dataclass(frozen=True)
class Seen:
    """A live process: its command line (words joined by spaces) and its environment as NAME=VALUE."""

    pid: int
    command: str
    environment: frozenset[str]


def seen() -> Iterator[Seen]:
    """Every process of the machine that can be looked at."""
    for pid in all_pids():
        folder = Path("/proc", str(pid))
        try:
            command, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue  # it ended meanwhile
        words = command.decode(errors="replace").replace("\0", " ")
        yield Seen(pid, words, frozenset(environment.decode(errors="replace").split("\0")))
