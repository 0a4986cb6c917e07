"""SGLang's own transfer classes as a rival, where `make sglang-env` was run: a process in that environment."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

from shape import Load, Setup

HERE = Path(__file__).parent
SGLANG = HERE.parents[1] / "hack" / "sglang"


class SglangFailed(Exception):
    """It could not be measured, and why."""


def environment() -> Path | None:
    """Its folder, or None where it is not installed."""
    found = subprocess.run([str(SGLANG / "setup.sh"), "--path"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


class Sglang:
    """Rank processes of SGLang, stopped unless they are measured."""

    def __init__(self, folder: Path) -> None:
        variables = dict(os.environ)
        for line in (SGLANG / "cpu.env").read_text().splitlines():
            name, value = line.split("=", 1)
            variables[name] = value
        self._process = subprocess.Popen(
            [str(folder / "bin" / "python"), "-W", "ignore", str(HERE / "sglang_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
            text=True,
        )

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SglangFailed(f"its driver ended: {error}") from error
        if not select.select([self._process.stdout], [], [], 240.0)[0]:
            raise SglangFailed("its driver does not answer")
        line = self._process.stdout.readline()
        if not line:
            raise SglangFailed("its driver ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SglangFailed(answer["error"])
        return answer

    def open(self, setup: Setup) -> None:
        """Start ranks of this setup."""
        self._ask(
            do="open",
            prefill=setup.prefill,
            decode=setup.decode,
            page=setup.page,
            pool_pages=setup.pool_pages,
            layers=setup.model.layers,
            heads=setup.model.heads,
            dim=setup.model.dim,
            tls="tcp" if setup.transport == "tcp" else "",
        )

    def run(self, setup: Setup, load: Load, verify: bool = False) -> float:
        """Seconds of one request."""
        return float(self._ask(do="run", pages=load.pages(setup), verify=verify)["seconds"])

    def close_ranks(self) -> None:
        """End the ranks of this setup."""
        self._ask(do="close")

    def close(self) -> None:
        """End it all."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
