"""One pair with one backend: are its tokens right, how long to the first token, how long does the KV take."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kit_faults import heard
from kit_pair import Pair
from kit_server import Setting
from reference_kit import Truth
from sglang_compare_words import RIGHT, known, lives, raised, released_anyway, told

NEW = 8
CHECKED = (1, 15, 16, 17, 200, 1000)
"""Prompt lengths whose tokens are compared."""
TIMED = 1024
"""Tokens of a timed prompt."""
CHUNK = TIMED
"""No timed prompt is cut: its KV goes in one piece, after prefill has computed it."""
KV_TOKENS = 16384
SERVED = "served again"
LATENCY, SIZE = "kv_transfer_latency_ms", "kv_transfer_total_mb"


@dataclass(frozen=True)
class Work:
    """The requests, the same for every pair."""

    model: Path
    checked: tuple[tuple[list[int], list[int]], ...]
    """Prompts and the tokens of transformers."""
    timed: tuple[list[int], ...]
    """Prompts without a common prefix, so that prefill computes each of them."""
    cap: float
    timed_tokens: int = TIMED

    @classmethod
    def of(cls, truth: Truth, model: Path, rounds: int, cap: float) -> Work:
        """Ask transformers."""
        checked = tuple(truth.decided(length, NEW) for length in CHECKED)
        timed = tuple(truth.decided(TIMED, 1, seed=10 + i)[0] for i in range(rounds + 1))
        return cls(model, checked, timed, cap)

    def setting(self, backend: str) -> Setting:
        """Of both servers. SGLang's own limits for a stuck request are 300 s; here they are half of the cap, so
        that what it does then can be seen."""
        limit = str(max(5, int(self.cap / 2)))
        limits = ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT")
        return Setting(
            self.model,
            "",
            backend=backend,
            tokens=KV_TOKENS,
            chunk=CHUNK,
            # What torch would compile for a rank of TP 2 is one small mask, and the compiler takes a minute.
            variables=(*((name, limit) for name in limits), ("TORCHDYNAMO_DISABLE", "1")),
        )


@dataclass
class Measured:
    """Of one pair. Times in ms; `failed` says why there are none."""

    backend: str
    prefill_tp: int
    decode_tp: int
    right: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    transfer_ms: list[float] = field(default_factory=list)
    """SGLang's metric, one value a request (mean over the ranks that report)."""
    transfer_mb: float = 0.0
    """MiB of one request, as SGLang counts them."""
    start_seconds: float = 0.0
    failed: str = ""
    """What the clients were told by the first request that got no tokens."""
    failed_seconds: float | None = None
    """Until decode's client knew; None: not within the cap."""
    then: str = ""
    """What was left after that failure."""
    answer_seconds: float = 0.0
    """Of the last request whose tokens were compared."""

    @property
    def shape(self) -> str:
        """TP of both."""
        return f"{self.prefill_tp} -> {self.decode_tp}"


def measure(work: Work, both: Pair, backend: str) -> Measured:
    """Ask a running pair."""
    found = Measured(backend, both.prefill.setting.tp, both.decode.setting.tp)
    found.start_seconds = max(both.prefill.start_seconds, both.decode.start_seconds)
    if _check(both, work, found):
        _time(both, work, found)
    return found


def _check(both: Pair, work: Work, found: Measured) -> bool:
    """Compare tokens; False after the first request that got none."""
    since = [both.prefill.said(), both.decode.said()]
    for prompt, expected in work.checked:
        found.checked += 1
        began = time.monotonic()
        prefill, decode = both.begin(prompt, NEW, timeout=work.cap)
        answer = heard(decode.result, began)
        said = told(answer, expected)
        found.answer_seconds = answer.seconds
        if said == RIGHT:
            found.right += 1
        elif answer.status == 200:
            found.wrong.append(f"{len(prompt)} tokens: {said}")
        else:
            other = heard(prefill.result, began)
            found.failed = f"decode's client: {said}; prefill's after {other.seconds:.0f} s: {told(other)}"
            found.failed_seconds = known(answer)
            found.then = _left(both, work, since)
            return False
    return True


def _left(both: Pair, work: Work, since: list[int]) -> str:
    """What both servers say of themselves, what they raised, and whether the next request is served."""
    servers = (both.prefill, both.decode)
    said = [lives(server) for server in servers]
    for server, start in zip(servers, since, strict=True):
        said += raised(server, start)
    return "; ".join((*said, again(both, work), *released_anyway(both.decode, since[1])))


def again(both: Pair, work: Work) -> str:
    """Does it serve, and after how long."""
    prompt, expected = work.checked[2]
    try:
        return f"{SERVED} after {both.serve_again(prompt, expected, work.cap):.1f} s"
    except AssertionError as error:
        return (str(error).splitlines() or ["the next request's tokens are WRONG"])[0][:200]


def _time(both: Pair, work: Work, found: Measured) -> None:
    """One request at a time, the first one for the warm-up."""
    for number, prompt in enumerate(work.timed):
        before, fields = both.prefill.metrics(), both.fields()
        with ThreadPoolExecutor(1) as pool:
            prefill = pool.submit(both.prefill.generate, prompt, 2, work.cap, **fields)
            first = both.decode.first_token_seconds(prompt, 2, work.cap, **fields)
            prefill.result()
        after = both.prefill.metrics()
        if number == 0:
            continue
        found.first_token_ms.append(1e3 * first)
        count = after[f"{LATENCY}_count"] - before.get(f"{LATENCY}_count", 0.0)
        if count:
            found.transfer_ms.append((after[f"{LATENCY}_sum"] - before.get(f"{LATENCY}_sum", 0.0)) / count)
            found.transfer_mb = after[f"{SIZE}_sum"] - before.get(f"{SIZE}_sum", 0.0)


def median(values: list[float]) -> float | None:
    """None without values."""
    return statistics.median(values) if values else None
