"""One pair with one backend: are its tokens right, how long to the first token, how long does the KV take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from kit_pair import Pair, pair
from kit_server import Setting
from reference_kit import Truth

NEW = 8
CHECKED = (1, 15, 16, 17, 200, 1000)
"""Prompt lengths whose tokens are compared."""
TIMED = 1024
"""Tokens of a timed prompt."""
CHUNK = TIMED
"""No timed prompt is cut: its KV goes in one piece, after prefill has computed it."""
KV_TOKENS = 16384
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
            variables=tuple((name, limit) for name in limits),
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
    failed_seconds: float = 0.0
    healthy_after: str = ""
    """What /health says after the failure."""

    @property
    def shape(self) -> str:
        """TP of both."""
        return f"{self.prefill_tp} -> {self.decode_tp}"


def measure(
    work: Work,
    scratch: Path,
    backend: str,
    shape: tuple[int, int],
    afterwards: Callable[[Pair], None] | None = None,
) -> Measured:
    """Start the pair, ask, do what is to be done with it afterwards if it served, stop it."""
    found = Measured(backend, *shape)
    folder = scratch / f"{backend.split()[0]}-{shape[0]}-{shape[1]}"
    folder.mkdir()
    try:
        with pair(work.setting(backend), folder, *shape) as both:
            found.start_seconds = max(both.prefill.start_seconds, both.decode.start_seconds)
            if _check(both, work, found):
                _time(both, work, found)
                if afterwards is not None:
                    afterwards(both)
    except AssertionError as error:  # it did not start
        found.failed = found.failed or str(error).splitlines()[0]
    return found


def _check(both: Pair, work: Work, found: Measured) -> bool:
    """Compare tokens; False after the first request that got none."""
    for prompt, expected in work.checked:
        found.checked += 1
        _, decode = both.begin(prompt, NEW, timeout=work.cap)
        try:
            answer = decode.result()
        except httpx.TransportError as error:
            found.failed = f"decode: {type(error).__name__}"
        else:
            if answer.status_code != 200:
                found.failed = f"HTTP {answer.status_code}: {answer.text[:400]}"
            elif answer.json()["output_ids"] == expected:
                found.right += 1
            else:
                found.wrong.append(f"{len(prompt)} tokens: {answer.json()['output_ids']} for {expected}")
            found.failed_seconds = answer.elapsed.total_seconds()
        if found.failed:
            found.healthy_after = ", ".join(
                f"{name} /health {'200' if server.healthy() else 'fails'}"
                for name, server in (("prefill", both.prefill), ("decode", both.decode))
            )
            return False
    return True


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
