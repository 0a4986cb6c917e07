"""Running programs with a deadline and an error that shows what they said."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]


class CommandFailed(Exception):
    """A program ended with an error or ran past its deadline."""


def run(
    command: Sequence[str],
    *,
    timeout: float = 60,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    show: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `command`; raises CommandFailed (with the output's end) on a non-zero exit when `check`.
    With `show`, what it says on stderr goes to ours while it runs, and is not part of the result."""
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            timeout=timeout,
            env={**os.environ, **(env or {})},
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise CommandFailed(f"{' '.join(command)}: no end after {timeout:.0f} s") from late
    if check and done.returncode != 0:
        said = ((done.stderr or "").strip() or done.stdout.strip())[-2000:]
        raise CommandFailed(f"{' '.join(command)}: exit {done.returncode}\n{said}")
    return done


def wait_for(
    what: str,
    probe: Callable[[], T | None],
    *,
    timeout: float,
    every: float = 0.25,
    context: Callable[[], str] = str,
) -> T:
    """Call `probe` until it gives a true value; TimeoutError names `what`, with `context()` appended."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s\n{context()}")
        time.sleep(every)
