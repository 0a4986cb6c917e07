"""The faults that users of disaggregated SGLang meet, provoked on a real pair: what happens, after how many seconds,
and what the client is told."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kit_faults import Heard, begin_long, heard, kill_scheduler
from kit_pair import Pair, pair
from kit_server import Server, running
from sglang_compare_pairs import NEW, Work

LONG, BEGUN = 3800, 2
"""Tokens of a prompt of four chunks; the fault comes when two of them are computed and KV is under way."""


@dataclass(frozen=True)
class Fault:
    """One fault on one backend. `seconds` until the client knew (None: not within the cap), `user` what it was told."""

    backend: str
    name: str
    seconds: float | None
    user: str
    then: str


def faults_on(both: Pair, work: Work, log: Callable[[str], None]) -> list[Fault]:
    """Those of a running pair, which is repaired after each."""
    found: list[Fault] = []
    backend = both.decode.setting.backend
    long = (work.timed[0] * 4)[:LONG]
    for name, provoke in FAULTS.items():
        log(f"{backend}, fault: {name}")
        try:
            found.append(Fault(backend, name, *provoke(both, work, long)))
        except AssertionError as error:
            found.append(Fault(backend, name, None, "-", f"not provoked: {str(error).splitlines()[0]}"))
        log(f"  {found[-1].seconds} s: {found[-1].user}; {found[-1].then}")
    return found


Outcome = tuple[float | None, str, str]


def told(what: Heard) -> str:
    """What a client got, in short."""
    if what.status == -1:
        return "nothing"
    if what.status == 0:
        return "the connection ended without an answer"
    message = re.search(r'"message":"((?:[^"\\]|\\.)*)"', what.text)
    text = message[1] if message else what.text
    text = " ".join(re.sub(r"^.*with exception ", "", text).split())
    return f"HTTP {what.status}: {text[:220]}"


def known(what: Heard) -> float | None:
    """Seconds, None where nothing was heard."""
    return None if what.status == -1 else what.seconds


def again(both: Pair, work: Work) -> str:
    """Does it serve, and after how long."""
    prompt, expected = work.checked[2]
    try:
        return f"served again after {both.serve_again(prompt, expected, work.cap):.1f} s"
    except AssertionError as error:
        return str(error).splitlines()[0][:200]


def freed(server: Server, work: Work) -> str:
    """When it held nothing any more."""
    began = time.monotonic()
    try:
        server.await_idle(work.cap)
    except AssertionError as error:
        return f"{server.setting.role} still holds after {work.cap:.0f} s: {str(error).splitlines()[0][-120:]}"
    except Exception as error:
        return f"{server.setting.role} does not answer: {type(error).__name__}"
    return f"{server.setting.role}'s pages free after {time.monotonic() - began:.0f} s"


@contextlib.contextmanager
def repaired(server: Server) -> Iterator[None]:
    """Started again on the same address afterwards if it ended."""
    yield
    if server.ended() or not server.schedulers():
        server.stop()
        server.start()
        server.await_healthy()


def misfit_page(both: Pair, work: Work, long: list[int]) -> Outcome:
    """The settings do not fit: a decode with pages twice as large asks the same prefill."""
    prompt, _ = work.checked[2]
    misfit = Server(replace(both.decode.setting, page=2 * both.decode.setting.page), both.decode.folder)
    with running(misfit):
        began = time.monotonic()
        answer = heard(Pair(both.prefill, misfit).begin(prompt, NEW, timeout=work.cap)[1].result, began)
        raised = re.findall(r"^RuntimeError: .*", misfit.log.read_text(errors="replace"), re.MULTILINE)
        lives = "that decode lives" if misfit.healthy() else "that decode is DEAD"
    why = f" ({raised[-1][:160]})" if raised else ""
    return known(answer), told(answer), f"{lives}{why}; the fitting pair {again(both, work)}"


def prefill_dies(both: Pair, work: Work, long: list[int]) -> Outcome:
    """Prefill's scheduler is killed in the middle of a request; prefill comes back on the same address."""
    _, decode = begin_long(both, long, NEW, work.cap, BEGUN)
    answer = heard(decode.result, kill_scheduler(both.prefill))
    held = freed(both.decode, work)
    with repaired(both.prefill):
        pass
    return known(answer), told(answer), f"{held}; with a new prefill {again(both, work)}"


def decode_dies(both: Pair, work: Work, long: list[int]) -> Outcome:
    """Decode's scheduler is killed in the middle of a request; decode comes back on the same address."""
    prefill, decode = begin_long(both, long, NEW, work.cap, BEGUN)
    began = kill_scheduler(both.decode)
    answer, other = heard(decode.result, began), heard(prefill.result, began)
    held = freed(both.prefill, work)
    with repaired(both.decode):
        pass
    of_prefill = f"prefill's client after {other.seconds:.0f} s: {told(other)}"
    return known(answer), told(answer), f"{of_prefill}; {held}; with a new decode {again(both, work)}"


FAULTS: dict[str, Callable[[Pair, Work, list[int]], Outcome]] = {
    "settings do not fit: decode's page size is not prefill's": misfit_page,
    "a peer restarts: prefill's scheduler is killed under a request": prefill_dies,
    "a peer restarts: decode's scheduler is killed under a request": decode_dies,
}


FABRIC = "the fabric is not what was asked: UCX_NET_DEVICES names an RDMA adapter that is not there"


def other_fabric(work: Work, scratch: Path, backend: str) -> Fault:
    """A pair of its own: does it start, does it serve, and does anything it prints say what moves its KV."""
    folder = scratch / f"{backend.split()[0]}-fabric"
    folder.mkdir()
    prompt, expected = work.checked[2]
    asked = (("UCX_NET_DEVICES", "mlx5_0:1"),)
    servers: list[Server] = []
    began = time.monotonic()
    try:
        with pair(work.setting(backend), folder, 1, 1, asked, asked) as both:
            servers = [both.prefill, both.decode]
            began = time.monotonic()
            answer = heard(both.begin(prompt, NEW, timeout=work.cap)[1].result, began)
            user = (
                "the right tokens"
                if f'"output_ids":{json.dumps(expected, separators=(",", ":"))}' in answer.text
                else told(answer)
            )
            return Fault(backend, FABRIC, known(answer), user, f"its output says: {spoken(servers)}")
    except AssertionError as error:
        return Fault(backend, FABRIC, time.monotonic() - began, "it does not start", str(error).splitlines()[-1][-200:])


def spoken(servers: list[Server]) -> str:
    """Lines of the servers' output about the adapter or the transport, without their time stamps."""
    found: list[str] = []
    for server in servers:
        for line in server.log.read_text(errors="replace").splitlines():
            if re.search(r"mlx5|transport|\btcp\b|\bcma\b|\bsysv\b", line, re.IGNORECASE) and "server_args" not in line:
                text = re.sub(r"^\[[^]]*\]\s*", "", line)[:160]
                if text not in found:
                    found.append(text)
    return " / ".join(found[:3]) or "nothing about it"
