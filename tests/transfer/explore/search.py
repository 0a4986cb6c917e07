"""Breadth-first over all paths of actions. A path is replayed on a new world, since a world of real
coroutines cannot be copied; states that were seen before are not followed again."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .actions import Action, apply, enabled
from .bounds import Bounds, Violation
from .checks import check
from .fair import conclude
from .snapshot import fingerprint
from .world import World

Path = tuple[Action, ...]


@dataclass
class Result:
    """What a search found. `path` leads to the first violation, the shortest there is."""

    states: int = 0
    transitions: int = 0
    concluded: int = 0
    depth: int = 0
    seconds: float = 0.0
    """Of processor time."""
    exhausted: bool = False
    """Every state within the bounds was seen."""
    path: Path | None = None
    violation: Violation | None = None
    after: tuple[str, ...] = ()
    """What followed the path, once faults had stopped, until it showed."""
    seen: set[str] = field(default_factory=set)
    """Names of actions that happened."""

    def __str__(self) -> str:
        head = (
            f"{self.states} states, {self.transitions} transitions, {self.concluded} concluded, depth {self.depth}, "
            f"{self.seconds:.1f} s, {'all' if self.exhausted else 'not all'} states within the bounds"
        )
        if self.path is None:
            return head
        steps = "\n".join(f"  {n}. {' '.join(action)}" for n, action in enumerate(self.path, 1))
        then = "\n  faults stop\n" + "\n".join(f"  . {step}" for step in self.after) if self.after else ""
        return f"{head}\n{self.violation}\n{steps}{then}"


def explore(
    bounds: Bounds,
    *,
    states: int,
    depth: int = 100,
    seconds: float = 600.0,
    liveness: bool = True,
    make: Callable[[Bounds], World] = World,
) -> Result:
    """Until a violation, or until so many states, such a depth or so many seconds."""
    result = Result()
    began = time.process_time()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # what was there before is not looked at again
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 20, 20)
    seen: set[int] = set()
    good: set[int] = set()
    frontier: deque[tuple[Path, list[Action]]] = deque()

    def look(path: Path) -> None:
        world = make(bounds)
        try:
            for action in path[:-1]:
                apply(world, action)
            if path:
                apply(world, path[-1])
                result.seen.add(path[-1][0])
            check(world)
            mark = fingerprint(world)
            if mark in seen:
                return
            seen.add(mark)
            result.states += 1
            result.depth = max(result.depth, len(path))
            frontier.append((path, enabled(world)))
            if liveness:
                conclude(world, good)
                result.concluded += 1
        except Violation as violation:
            result.path, result.violation, result.after = path, violation, tuple(world.after)
        finally:
            world.close()

    try:
        look(())
        while frontier and result.path is None:
            path, actions = frontier.popleft()
            if len(path) >= depth:
                break
            for action in actions:
                result.transitions += 1
                look((*path, action))
                if result.path is not None or result.states >= states or time.process_time() - began > seconds:
                    return result
        result.exhausted = result.path is None and not frontier
    finally:
        result.seconds = time.process_time() - began
        logging.disable(logging.NOTSET)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    return result


def replay(bounds: Bounds, path: Path, make: Callable[[Bounds], World] = World) -> World:
    """The world at the end of a path; the caller closes it."""
    world = make(bounds)
    try:
        for action in path:
            apply(world, action)
            check(world)
    except BaseException:
        world.close()
        raise
    return world
