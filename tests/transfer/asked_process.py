"""A process of a test's own that is asked and answers with JSON lines, on its stdin and on a pipe of their own: UCX
writes its errors to stdout, from any thread and into the middle of a line."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_S = 90.0
_ANSWERS = "ASKED_PROCESS_ANSWERS"
"""Environment variable: number of the pipe's end that answers go to."""


class AskedProcess:
    """Starts, asks and kills the process; every answer has a deadline."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, quiet: bool = False) -> None:
        """`quiet`: what it says on stdout and stderr is dropped."""
        ours, its = os.pipe()
        said = subprocess.DEVNULL if quiet else None
        try:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                text=True,
                env={**env, _ANSWERS: str(its)},
                pass_fds=(its,),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, answers: int) -> None:
        with open(answers, encoding="utf-8") as lines:
            for line in lines:
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
    left = (json.dumps(answer) + "\n").encode()
    while left:
        left = left[os.write(int(os.environ[_ANSWERS]), left) :]
