"""A prefill and a decode engine of the Reference kind that can be asked together, killed and started again."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from reference_kit import Running, await_healthy, launch

_rooms = itertools.count(70_000)


def start(model: Path, folder: Path, role: str, waiting: float, *flags: str) -> Running:
    """One side, under the same pod UID each time. `waiting` is its --kv-waiting-timeout in seconds."""
    return launch(
        model,
        folder / f"{role}-{time.monotonic_ns()}.log",
        *("--disaggregation-mode", role, "--pod-uid", f"uid-{role}", "--peers-file", str(folder / "cards")),
        *("--kv-waiting-timeout", str(waiting), "--page-size", "16", *flags),
        wait=False,
    )


class Pair:
    """Both sides, healthy; their cards meet in `folder`."""

    def __init__(self, model: Path, folder: Path, waiting: float, *decode_flags: str) -> None:
        self._model, self._folder, self._waiting, self._decode_flags = model, folder, waiting, decode_flags
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        await_healthy(self.prefill)
        await_healthy(self.decode)

    def start(self, role: str) -> Running:
        """Start one side (again)."""
        flags = self._decode_flags if role == "decode" else ()
        return start(self._model, self._folder, role, self._waiting, *flags)

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    def fields(self, room: int | None = None) -> dict[str, Any]:
        """What a router adds to a request; a room of its own unless one is given."""
        return bootstrap(self.prefill, room)

    def ask(self, prompt: list[int], new: int, room: int | None = None) -> tuple[httpx.Response, httpx.Response]:
        """The same request to both sides at once, as a router sends it: (prefill's answer, decode's)."""
        fields = self.fields(room)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(e.generate, prompt, new, **fields) for e in (self.prefill, self.decode)]
            return both[0].result(), both[1].result()

    def serve(self, prompt: list[int], expected: list[int], room: int | None = None) -> None:
        """Ask until the pair serves; a wrong answer is never retried, an error must have a name."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            _, answer = self.ask(prompt, len(expected), room)
            if answer.status_code == 200:
                assert answer.json()["output_ids"] == expected
                return
            assert answer.json()["error"]["type"], answer.text
            time.sleep(0.2)
        raise AssertionError(answer.text)


def bootstrap(prefill: Running, room: int | None = None) -> dict[str, Any]:
    """bootstrap_{host,port,room} of a request to `prefill`."""
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": next(_rooms) if room is None else room,
    }


def idle(engine: Running, seconds: float = 60) -> None:
    """Wait until no request holds a page and all pages are free."""
    end = time.monotonic() + seconds
    while True:
        load = engine.get("/get_load").json()[0]
        if load["num_held_reqs"] == 0 and load["pages_free"] == load["pages_total"]:
            return
        assert time.monotonic() < end, load
        time.sleep(0.1)
