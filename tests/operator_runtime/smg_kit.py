"""The real router, smg, as the operator starts it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from free_ports import free_port


@contextlib.contextmanager
def smg(key: str, *flags: str) -> Iterator[int]:
    """It runs and listens, and takes `key` from an operator; its port. `make setup` installs it."""
    program = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    assert program is not None, "smg is missing (extra `router`): run make setup"
    port = free_port()
    process = subprocess.Popen(
        [
            program, "launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(free_port()), "--control-plane-api-keys", f"op:op:admin:{key}", *flags,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _listens(port, process)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _listens(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < deadline and process.poll() is None, "smg does not listen"
        time.sleep(0.1)
