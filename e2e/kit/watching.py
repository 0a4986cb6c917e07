"""A client that keeps asking while something breaks, and what it saw."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from e2e.kit import requests
from e2e.kit.truth import Expected


@dataclass
class History:
    """Every answer of a load, in order."""

    pairs: list[tuple[Expected, requests.Answer]] = field(default_factory=list)

    @property
    def wrong_tokens(self) -> list[str]:
        """Answers that claim success (200) with other tokens: the one thing that must never be."""
        return requests.wrong([(e, a) for e, a in self.pairs if a.status == 200])

    @property
    def unanswered(self) -> list[str]:
        """What was seen instead of an HTTP answer, with any status: the connection ended, or nothing came in time."""
        return [f"after {a.seconds:.1f} s: {a.body[:300]}" for _, a in self.pairs if a.status == 0]

    @property
    def succeeded(self) -> int:
        return sum(a.status == 200 for _, a in self.pairs)

    @property
    def slowest(self) -> float:
        """Seconds of the longest request."""
        return max((a.seconds for _, a in self.pairs), default=0.0)


@contextmanager
def load(base: str, cases: list[Expected], clients: int = 2, pause: float = 0.05) -> Iterator[History]:
    """`clients` threads that send the cases in turn, each `pause` seconds after its last answer, until the block
    ends."""
    history = History()
    stop = threading.Event()

    def client(offset: int) -> None:
        for case in itertools.islice(itertools.cycle(cases), offset, None):
            if stop.is_set():
                return
            answer = requests.generate(base, case.prompt, len(case.tokens), timeout=90)
            history.pairs.append((case, answer))
            stop.wait(pause)

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield history
    finally:
        stop.set()
        for thread in threads:
            thread.join(100)
