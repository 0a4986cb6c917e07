"""This machine: SGLang's own environment, one server or pair at a time, free ports, and processes of a session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from free_ports import free_port

__all__ = ["HACK", "TREE", "alone", "cpu_variables", "environment", "free_port", "kill_session", "session_members"]
TREE = Path(__file__).parents[2]
HACK = TREE / "hack" / "sglang"
LOCK = Path(tempfile.gettempdir()) / "sglang.lock"
LOCK_S = 1800.0
"""Seconds to wait until another SGLang on this machine has ended."""
GONE_S = 20.0
"""Seconds until killed processes have to be gone."""


def environment() -> Path | None:
    """The folder of SGLang's own Python environment, or None where `make sglang-env` was not run."""
    found = subprocess.run([str(HACK / "setup.sh"), "--path"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


def cpu_variables() -> dict[str, str]:
    """The variables SGLang needs to run without a GPU."""
    lines = [line for line in (HACK / "cpu.env").read_text(encoding="utf-8").splitlines() if "=" in line]
    return dict(line.split("=", 1) for line in lines)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the machine's lock for SGLang: two cores and 20 GB carry one server or pair, not two. It is held already
    where the tests run under `flock LOCK make test-sglang`."""
    with LOCK.open("a") as file:
        if _handed_down(os.fstat(file.fileno())):
            yield
            return
        # In a thread: the kernel serves those first who wait in it, and gives that wait no deadline.
        waiting = threading.Thread(target=fcntl.flock, args=(file, fcntl.LOCK_EX), daemon=True)
        waiting.start()
        waiting.join(LOCK_S)
        if waiting.is_alive():
            raise TimeoutError(f"{LOCK} was held by others for {LOCK_S:.0f} s")
        yield


def _handed_down(lock: os.stat_result) -> bool:
    """Whoever started this process has locked the file, and left it open for us: a lock of the same opening is ours."""
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            # Our own openings are never inherited by others, nor are they locked yet.
            if os.get_inheritable(int(name)) and os.path.samestat(os.fstat(int(name)), lock):
                fcntl.flock(int(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    return False


def session_members(session: int) -> dict[int, str]:
    """Living processes of a session (a server is started as leader of its own): process id -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The command in parentheses may hold anything: the fields begin after the last one.
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) != session or state == "Z":
                continue
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, ValueError):
            continue  # it ended while we looked
        found[int(folder.name)] = title
    return found


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """SIGKILL to every process of the session `leader` leads; returns when none is left."""
    until = time.monotonic() + GONE_S
    while members := session_members(leader.pid):
        if time.monotonic() > until:
            raise TimeoutError(f"processes outlived SIGKILL by {GONE_S:.0f} s: {members}")
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        time.sleep(0.05)
    leader.wait(GONE_S)
