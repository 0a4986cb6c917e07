"""Failures of the embedded cluster, told so that a person knows what to do next."""

from __future__ import annotations

from pathlib import Path


class ClusterError(Exception):
    """What failed, what to do about it, and the log that says why."""

    def __init__(self, message: str, *, hint: str = "", log: Path | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def render(self) -> str:
        parts = [f"error: {self.message}"]
        if self.log is not None:
            parts.append(f"--- last lines of {self.log}\n{log_tail(self.log)}\n---")
        if self.hint:
            parts.append(f"what to do: {self.hint}")
        return "\n".join(parts)


def log_tail(path: Path, lines: int = 25, width: int = 400) -> str:
    """The end of a log, with overlong lines cut, or a word that there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(no log: {error.strerror})"
    kept = [line[:width] for line in text.splitlines()[-lines:]]
    return "\n".join(kept) if kept else "(the log is empty)"
