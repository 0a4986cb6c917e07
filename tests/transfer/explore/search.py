"""Breadth-first over all paths of actions. A path is replayed on a new world, since a world of real
coroutines cannot be copied; a state that was seen before is not followed again."""

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
from .fair import Calm
from .snapshot import fingerprint
from .world import World

Path = tuple[Action, ...]


@dataclass
class Result:
    """What a search found. `path` leads to the first violation, the shortest there is."""

    states: int = 0
    transitions: int = 0
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
            f"{self.states} states, {self.transitions} transitions, depth {self.depth}, "
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
    shortest: bool = False,
    make: Callable[[Bounds], World] = World,
) -> Result:
    """Until a violation, or until so many states were seen.

    From each new state faults stop, and what follows is followed to its end or to a state that is known
    to come to one. Its states are new ones like any others, so a path need not be the shortest one to its
    state; with `shortest` they are not followed further, and the first violation has a shortest path."""
    search = _Search(bounds, states, shortest, make)
    began = time.process_time()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # what was there before is not looked at again
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    try:
        search.run()
    finally:
        search.result.seconds = time.process_time() - began
        logging.disable(logging.NOTSET)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    return search.result


class _Search:
    def __init__(self, bounds: Bounds, states: int, shortest: bool, make: Callable[[Bounds], World]) -> None:
        self.result = Result()
        self._bounds, self._most, self._shortest, self._make = bounds, states, shortest, make
        self._seen: set[int] = set()
        self._good: set[int] = set()
        self._frontier: deque[tuple[Path, list[Action]]] = deque()

    def run(self) -> None:
        """Breadth first: the oldest state's actions are tried next."""
        self._look(())
        while self._frontier and self.result.path is None:
            path, actions = self._frontier.popleft()
            for action in actions:
                self.result.transitions += 1
                self._look((*path, action))
                if self.result.path is not None or self.result.states >= self._most:
                    return
        self.result.exhausted = self.result.path is None

    def _look(self, path: Path) -> None:
        """Where one path leads."""
        world = self._make(self._bounds)
        try:
            for action in path:
                apply(world, action)
            check(world)
            if path:
                self.result.seen.add(path[-1][0])
            mark = fingerprint(world)
            if mark not in self._seen:
                actions = self._enter(path, mark, world)
                calm = Calm(world)
                if self._shortest or self._follow(path, actions, mark, calm):
                    calm.conclude(self._good)
        except Violation as violation:
            self.result.path, self.result.violation, self.result.after = path, violation, tuple(world.after)
        finally:
            world.close()

    def _enter(self, path: Path, mark: int, world: World) -> list[Action]:
        """A state that is new; the actions that are to be tried from it."""
        self._seen.add(mark)
        self.result.states += 1
        self.result.depth = max(self.result.depth, len(path))
        actions = enabled(world)
        self._frontier.append((path, actions))
        return actions

    def _follow(self, path: Path, actions: list[Action], mark: int, calm: Calm) -> bool:
        """What happens once faults stop, state by state, until time has to pass (True) or a state comes that
        was followed before."""
        entered = {mark}
        while (action := calm.next()) is not None:
            if action in actions:
                actions.remove(action)
                self.result.transitions += 1
            path = (*path, action)
            calm.do(action)
            check(calm.world)
            calm.reported()
            mark = fingerprint(calm.world)
            if mark in entered:
                actions = []
            elif mark in self._seen:
                return False
            else:
                entered.add(mark)
                actions = self._enter(path, mark, calm.world)
        return True


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
