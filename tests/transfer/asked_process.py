"""A process of a test's own that is asked and answers with JSON lines, on its stdin and stdout."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_S = 90.0


class AskedProcess:
    """Starts, asks and kills the process; every answer has a deadline."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, quiet: bool = False) -> None:
        """`quiet`: what it says on stderr is dropped."""
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env=dict(env),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print too
                self._lines.put(line)

    def tell(self, do: str, **values: object) -> None:
        """Say what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = ANSWER_S) -> dict[str, Any]:
        """Its next line."""
        answer: dict[str, Any] = json.loads(self._lines.get(timeout=timeout))
        return answer

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        """Say what to do, and hear the answer."""
        self.tell(do, **values)
        return self.answer()

    def end(self) -> None:
        """Kill it, also where it is stopped."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(60)


def say(**answer: object) -> None:
    """In such a process: the next answer."""
    print(json.dumps(answer), flush=True)
