"""A flag that `multiprocessing.connection.wait` can wait for, set from any thread."""

from __future__ import annotations

import os


class Wake:
    """An eventfd: `set` from any thread, wait on it by `fileno`, then `clear`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while set."""
        return self._fd

    def set(self) -> None:
        """Wake the waiter."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget all `set` calls so far."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return
