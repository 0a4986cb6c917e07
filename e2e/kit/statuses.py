"""Every state that an object went through, as `kubectl get --watch` tells it: none is missed, none is asked for."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import CommandFailed, wait_for

Object = dict[str, Any]


class Statuses:
    """One object's states since the watch began, oldest first; the first is what it was then."""

    def __init__(self, kubectl: Kubectl, kind: str, name: str) -> None:
        self._what = f"{kind}/{name}"
        self._kubectl, self._kind, self._name = kubectl, kind, name
        self._process = subprocess.Popen(
            kubectl.command("get", kind, name, "--watch", "--output=json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._states: list[Object] = []
        self._rest = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = json.JSONDecoder()
        for line in self._process.stdout:
            self._rest += line
            if line.rstrip() != "}":
                continue  # only a whole object's last line is not indented
            try:
                found, _ = decoder.raw_decode(self._rest)
            except ValueError:
                continue
            self._rest = ""
            self._states.append(found)

    def states(self) -> list[Object]:
        """What it was, oldest first. CommandFailed when the watch ended: then states may be missing."""
        if self._process.poll() is not None:
            raise CommandFailed(f"the watch of {self._what} ended: {self._rest}")
        return list(self._states)

    def conditions(self, which: str) -> list[Object]:
        """A condition in each state that has it."""
        return [c for s in self.states() for c in s.get("status", {}).get("conditions", []) if c["type"] == which]

    def reasons(self, which: str) -> set[str]:
        """Every reason that a condition had while it was not True."""
        return {c["reason"] for c in self.conditions(which) if c["status"] != "True"}

    def wait(self, what: str, probe: Callable[[Object], bool], *, timeout: float) -> Object:
        """The newest state, as soon as `probe` holds for it; the failure shows `kubectl describe`."""

        def newest() -> Object | None:
            found = self.states()
            return found[-1] if found and probe(found[-1]) else None

        return wait_for(
            f"{self._what}: {what}",
            newest,
            timeout=timeout,
            every=0.1,
            context=lambda: self._kubectl("describe", self._kind, self._name, check=False)[-4000:],
        )

    def close(self) -> None:
        """End the watch."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._reader.join(5)


def holds(found: Object, which: str) -> bool:
    """A condition is True, and was judged for the object's present generation."""
    generation = found["metadata"].get("generation")
    return any(
        c["type"] == which and c["status"] == "True" and c.get("observedGeneration", generation) == generation
        for c in found.get("status", {}).get("conditions", [])
    )


@contextmanager
def statuses(kubectl: Kubectl, kind: str, name: str) -> Iterator[Statuses]:
    """Watch an object for the length of the block, from its present state on."""
    made = Statuses(kubectl, kind, name)
    try:
        made.wait("the watch shows it", lambda _: True, timeout=30)
        yield made
    finally:
        made.close()
