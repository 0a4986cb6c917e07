"""A prefill and a decode server of real SGLang, asked together as a router asks them, or through the real router."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from kit_machine import TREE, alone, free_port, kill_session
from kit_plugins import PDCLUSTER
from kit_server import NIXL_DRAM, Server, Setting, asking, body, running

__all__ = ["NIXL_DRAM", "PDCLUSTER", "Pair", "pair", "plain", "router"]

_rooms = itertools.count(1 << 40)


@dataclass
class Pair:
    """Both servers."""

    prefill: Server
    decode: Server

    def fields(self, room: int | None = None) -> dict[str, Any]:
        """What a router adds to a request; a room of its own unless one is given."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": next(_rooms) if room is None else room,
        }

    def begin(
        self, prompt: list[int], new: int, timeout: float = 90.0, **more: Any
    ) -> tuple[Future[httpx.Response], Future[httpx.Response]]:
        """Send the same request to both; the answers to come (prefill's, decode's)."""
        fields = {**self.fields(), **more}
        pool = ThreadPoolExecutor(2)
        try:
            both = [pool.submit(s.generate, prompt, new, timeout, **fields) for s in (self.prefill, self.decode)]
        finally:
            pool.shutdown(wait=False)
        return both[0], both[1]

    def ask(
        self, prompt: list[int], new: int, timeout: float = 90.0, **more: Any
    ) -> tuple[httpx.Response, httpx.Response]:
        """Both answers: (prefill's, decode's)."""
        prefill, decode = self.begin(prompt, new, timeout, **more)
        return prefill.result(), decode.result()

    def tokens(self, prompt: list[int], new: int, timeout: float = 90.0) -> list[int]:
        """Decode's greedy tokens; an error is an AssertionError with both answers."""
        prefill, decode = self.ask(prompt, new, timeout)
        assert decode.status_code == 200, f"decode: {decode.text}\nprefill: {prefill.text}"
        return list(decode.json()["output_ids"])

    @contextlib.contextmanager
    def stream(self, prompt: list[int], new: int, timeout: float = 90.0) -> Iterator[Iterator[dict[str, Any]]]:
        """Decode's events as they come, each with all tokens so far; an error is an AssertionError with it."""
        fields = self.fields()
        with (
            asking(self.prefill, prompt, **fields),
            httpx.stream(
                "POST", self.decode.url + "/generate", json=body(prompt, new, stream=True, **fields), timeout=timeout
            ) as answer,
        ):
            events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
            yield map(_with_tokens, events)

    def serve_again(self, prompt: list[int], expected: list[int], seconds: float) -> float:
        """Ask until the pair serves; seconds it took. A wrong answer is never asked again."""
        began, said = time.monotonic(), ""
        while (left := began + seconds - time.monotonic()) > 0:
            try:
                _, answer = self.ask(prompt, len(expected), timeout=min(20.0, max(1.0, left)))
            except httpx.TransportError as error:
                said = repr(error)
            else:
                if answer.status_code == 200 and "output_ids" in answer.json():
                    assert answer.json()["output_ids"] == expected
                    return time.monotonic() - began
                said = answer.text
            time.sleep(0.2)
        raise AssertionError(f"not served again in {seconds:.0f} s: {said}")


def _with_tokens(event: dict[str, Any]) -> dict[str, Any]:
    assert "output_ids" in event, event
    return event


@contextlib.contextmanager
def pair(
    setting: Setting,
    folder: Path,
    prefill_tp: int,
    decode_tp: int,
    prefill_variables: tuple[tuple[str, str], ...] = (),
    decode_variables: tuple[tuple[str, str], ...] = (),
    prefill_flags: tuple[str, ...] = (),
    decode_flags: tuple[str, ...] = (),
) -> Iterator[Pair]:
    """A healthy pair; the only SGLang on this machine while it runs. `setting`'s role and tp are replaced, and each
    side's own variables and flags come after those of both."""
    prefill = replace(
        setting,
        role="prefill",
        tp=prefill_tp,
        variables=(*setting.variables, *prefill_variables),
        flags=(*setting.flags, *prefill_flags),
    )
    decode = replace(
        setting,
        role="decode",
        tp=decode_tp,
        variables=(*setting.variables, *decode_variables),
        flags=(*setting.flags, *decode_flags),
    )
    both = Pair(Server(prefill, folder), Server(decode, folder))
    with alone(), running(both.prefill, both.decode):
        yield both


@contextlib.contextmanager
def plain(setting: Setting, folder: Path, tp: int) -> Iterator[Server]:
    """A healthy server that is not disaggregated; the only SGLang on this machine while it runs."""
    server = Server(replace(setting, role="null", tp=tp), folder)
    with alone(), running(server):
        yield server


@contextlib.contextmanager
def router(both: Pair, folder: Path) -> Iterator[str]:
    """The real router (smg) with the pair as its workers; its address."""
    smg = shutil.which("smg", path=str(TREE / ".venv" / "bin")) or shutil.which("smg")
    if smg is None:
        raise RuntimeError("the router (smg) is missing: run make setup")
    port = free_port()
    command = [
        *(smg, "launch", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)),
        *("--prefill", both.prefill.url, str(both.prefill.bootstrap_port), "--decode", both.decode.url),
        *("--prometheus-port", str(free_port()), "--health-check-interval-secs", "5"),
    ]
    log = folder / "smg.log"
    # It is of the project's own Python, whoever runs the tests.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/readiness", timeout=5).status_code == 200:
                    break
            if time.monotonic() > until or process.poll() is not None:
                raise AssertionError(log.read_text(errors="replace"))
            time.sleep(0.2)
        yield url
    finally:
        kill_session(process)
