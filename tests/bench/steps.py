"""Where the time of one request goes: the moments at which it passes the session's main steps, on both sides.

    python tests/bench/steps.py [--transport shm|tcp] [--tokens N] [--page N] [--rounds N]

Equal TP, one rank a side. Medians in microseconds since prefill's thread took the request up, then what a handle costs
beside its post. The stamps themselves cost some 0.3 us each; both sides read one clock.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator

from group import Group, context
from shape import Load, Setup
from stamps import Stamp

POST, OPEN = "post", "command"


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="tests/bench/steps.py", description="where the time of one request goes")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def numbered(sides: list[list[Stamp]]) -> dict[str, float]:
    """Stamps of one request in microseconds since its first one, by side, step and how often it was passed."""
    stamps = sorted((at, f"{side} {step}") for side, held in zip("PD", sides, strict=True) for step, at in held)
    start = next(at for at, name in stamps if name == f"P {OPEN} begins")
    seen: Counter[str] = Counter()
    found = {}
    for at, name in stamps:
        if at >= start:
            seen[name] += 1
            found[f"{name} ({seen[name]})"] = (at - start) * 1e6
    return found


def between_posts(steps: dict[str, float]) -> Iterator[float]:
    """Microseconds from the end of each post to the beginning of the next."""
    number = 1
    while (begins := steps.get(f"P {POST} begins ({number + 1})")) is not None:
        yield begins - steps[f"P {POST} ends ({number})"]
        number += 1


def main() -> None:
    """Run and print."""
    asked = arguments()
    load = Load(asked.tokens)
    group = Group(context(), Setup(asked.transport, 1, 1, page=asked.page), ())
    held: dict[str, list[float]] = defaultdict(list)
    gaps: list[float] = []
    try:
        group.everywhere("stamp")
        group.run(group.job("auto", load))
        for _ in range(asked.rounds):
            group.everywhere("stamps")  # of what came between
            group.run(group.job("auto", load))
            steps = numbered(group.everywhere("stamps"))
            gaps += between_posts(steps)
            for name, at in steps.items():
                held[name].append(at)
    finally:
        group.close()
    common = {name: statistics.median(at) for name, at in held.items() if len(at) > asked.rounds / 2}
    for name, at in sorted(common.items(), key=lambda item: item[1]):
        print(f"{at:9.0f}  {name}")
    if gaps:
        print(f"{statistics.median(gaps):9.0f}  between two posts (median of {len(gaps)})")


if __name__ == "__main__":
    main()
