"""The faults that users of disaggregated SGLang meet, provoked on a real pair: what happens, after how many seconds,
and what the client is told. The names are those of the table, in its order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kit_faults import begin_long, heard, kill_scheduler
from kit_pair import Pair
from kit_server import Server, running
from sglang_compare_pairs import NEW, SERVED, Work, again
from sglang_compare_words import known, lives, raised, released_anyway, spoken, told

LONG, BEGUN = 3800, 2
"""Tokens of a prompt of four chunks; the fault comes when two of them are computed and KV is under way."""
UNEQUAL = "settings do not fit: TP {} -> {}, KV in host memory"
PAGE_SIZE = "settings do not fit: a decode with pages twice as large asks this prefill"
DTYPE = "settings do not fit: this decode (float32) asks a prefill with --dtype bfloat16"
FABRIC = "the fabric is not what was asked: UCX_NET_DEVICES names an RDMA adapter that is not there"
NO_RDMA = "the fabric is not what was hoped for: no adapter is named, and this machine has none"
FABRICS = {
    "adapter": (FABRIC, (("UCX_NET_DEVICES", "mlx5_0:1"),)),
    "no-rdma": (NO_RDMA, (("UCX_NET_DEVICES", "all"),)),
}
"""Name of the part to the fault and what both servers are started with."""
PREFILL_DIES = "a peer restarts: prefill's scheduler is killed under a request"
DECODE_DIES = "a peer restarts: decode's scheduler is killed under a request"


@dataclass(frozen=True)
class Fault:
    """One fault on one backend. `seconds` until the client knew (None: not within the cap), `user` what it was told."""

    backend: str
    name: str
    seconds: float | None
    user: str
    then: str


Outcome = tuple[float | None, str, str]
"""`seconds`, `user`, `then`."""


def faults_on(work: Work, both: Pair, backend: str, log: Callable[[str], None]) -> list[Fault]:
    """Those that a running pair can have; it is repaired after each."""
    found: list[Fault] = []
    long = (work.timed[0] * 4)[:LONG]
    for name, provoke in FAULTS.items():
        log(f"{backend}, fault: {name}")
        try:
            found.append(Fault(backend, name, *provoke(both, work, long)))
        except AssertionError as error:
            found.append(Fault(backend, name, None, "-", f"NOT PROVOKED: {str(error).splitlines()[0]}"))
        log(f"  {found[-1].seconds} s: {found[-1].user}; {found[-1].then}")
        if not again(both, work).startswith(SERVED):  # green, and dead inside: the next fault needs a pair
            log("  both servers are started again")
            for server in (both.prefill, both.decode):
                _restart(server)
    return found


def _freed(server: Server, work: Work) -> str:
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
def _repaired(*servers: Server) -> Iterator[None]:
    """Started again on the same address afterwards if it ended."""
    try:
        yield
    finally:
        for server in servers:
            if server.ended() or not server.schedulers():
                _restart(server)


def _restart(server: Server) -> None:
    server.stop()
    server.start()
    server.await_healthy()


def _misfit(both: Pair, misfit: Server, asked: Pair, number: int, work: Work) -> Outcome:
    """A third server that does not fit asks or is asked; then the pair that fits has to serve."""
    prompt, expected = work.checked[number]
    with running(misfit):
        since = [asked.decode.said(), asked.prefill.said()]
        began = time.monotonic()
        answer = heard(asked.begin(prompt, NEW, timeout=work.cap)[1].result, began)
        said = [lives(asked.decode), lives(asked.prefill)]
        said += [*raised(asked.decode, since[0]), *raised(asked.prefill, since[1])]
    with _repaired(both.prefill, both.decode):
        said.append(f"the fitting pair {again(both, work)}")
    return known(answer), told(answer, expected), "; ".join(said)


def misfit_page(both: Pair, work: Work, long: list[int]) -> Outcome:
    """Decode's page size is not prefill's."""
    misfit = Server(replace(both.decode.setting, page=2 * both.decode.setting.page), both.decode.folder)
    return _misfit(both, misfit, Pair(both.prefill, misfit), 2, work)


def misfit_dtype(both: Pair, work: Work, long: list[int]) -> Outcome:
    """Rule B4: both leave the KV dtype to the model's dtype, and that differs."""
    misfit = Server(replace(both.prefill.setting, flags=("--dtype", "bfloat16")), both.prefill.folder)
    return _misfit(both, misfit, Pair(misfit, both.decode), 4, work)


def prefill_dies(both: Pair, work: Work, long: list[int]) -> Outcome:
    """Prefill's scheduler is killed in the middle of a request; prefill comes back on the same address."""
    with _repaired(both.prefill, both.decode):
        since = both.decode.said()
        _, decode = begin_long(both, long, NEW, work.cap, BEGUN)
        answer = heard(decode.result, kill_scheduler(both.prefill))
        held = "; ".join((_freed(both.decode, work), *released_anyway(both.decode, since)))
    return known(answer), told(answer), f"{held}; with a new prefill {again(both, work)}"


def decode_dies(both: Pair, work: Work, long: list[int]) -> Outcome:
    """Decode's scheduler is killed in the middle of a request; decode comes back on the same address."""
    with _repaired(both.prefill, both.decode):
        prefill, decode = begin_long(both, long, NEW, work.cap, BEGUN)
        began = kill_scheduler(both.decode)
        answer, other = heard(decode.result, began), heard(prefill.result, began)
        held = _freed(both.prefill, work)
    of_prefill = f"prefill's client after {other.seconds:.0f} s: {told(other)}"
    return known(answer), told(answer), f"{of_prefill}; {held}; with a new decode {again(both, work)}"


FAULTS: dict[str, Callable[[Pair, Work, list[int]], Outcome]] = {
    PAGE_SIZE: misfit_page,
    DTYPE: misfit_dtype,
    PREFILL_DIES: prefill_dies,
    DECODE_DIES: decode_dies,
}


def other_fabric(work: Work, both: Pair, backend: str, name: str) -> Fault:
    """A pair that was started with another fabric: does it serve, and does anything it prints say what moves its KV."""
    prompt, expected = work.checked[2]
    began = time.monotonic()
    answer = heard(both.begin(prompt, NEW, timeout=work.cap)[1].result, began)
    said = f"its output says: {spoken([both.prefill, both.decode])}"
    return Fault(backend, name, known(answer), told(answer, expected), said)
