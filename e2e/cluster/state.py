"""What is remembered of a running cluster, and the lock that lets one command change it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .errors import ClusterError
from .paths import Layout


@dataclass(frozen=True)
class Settings:
    """What `up` decided; later commands go by it."""

    nodes: int
    port: int  # of the host's loopback, where the API server is
    tools: str  # the key of the programs that run

    def save(self, layout: Layout) -> None:
        temporary = layout.cluster_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(layout.cluster_file)


def load(layout: Layout) -> Settings | None:
    try:
        return Settings(**json.loads(layout.cluster_file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def locked(layout: Layout, timeout: float = 900.0) -> Iterator[None]:
    """Holds the cluster's lock; the file lies beside the state, which `down` removes."""
    deadline = time.monotonic() + timeout
    layout.lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # `down` removes the file: a lock on one that is gone protects nothing.
            if _still_there(descriptor, layout):
                break
        except BlockingIOError:
            pass
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"another command has held {layout.lock} for {timeout:.0f} s",
                hint="wait for it, or end it",
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)


def _still_there(descriptor: int, layout: Layout) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), layout.lock.stat())
    except FileNotFoundError:
        return False
