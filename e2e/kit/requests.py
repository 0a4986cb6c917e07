"""Requests as a user sends them: SGLang's /generate, through the router."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from e2e.kit.truth import Expected


@dataclass(frozen=True)
class Answer:
    """HTTP status (0: no answer), the tokens when it was 200, the body otherwise."""

    status: int
    tokens: tuple[int, ...]
    body: str
    seconds: float


def _post(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _generate(base: str, prompt: tuple[int, ...], new_tokens: int, **more: Any) -> urllib.request.Request:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return _post(f"{base}/generate", {"input_ids": list(prompt), "sampling_params": sampling, **more})


def generate(base: str, prompt: tuple[int, ...], new_tokens: int, *, timeout: float = 60) -> Answer:
    """POST {base}/generate, greedy. Never raises for what the other side does."""
    request = _generate(base, prompt, new_tokens)
    start = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
            data = json.loads(text)
            data = data[0] if isinstance(data, list) else data
            tokens = tuple(int(t) for t in data["output_ids"])
            return Answer(response.status, tokens, text, time.monotonic() - start)
    except urllib.error.HTTPError as refused:
        return Answer(refused.code, (), refused.read().decode(errors="replace"), time.monotonic() - start)
    except (OSError, ValueError, KeyError, TypeError) as broken:
        return Answer(0, (), f"{type(broken).__name__}: {broken}", time.monotonic() - start)


@contextlib.contextmanager
def streamed(
    base: str, prompt: tuple[int, ...], new_tokens: int, *, timeout: float = 90
) -> Iterator[Iterator[dict[str, Any]]]:
    """The same as `generate`, streamed: its events one by one, each with all tokens so far. The connection is closed
    when the block ends, whatever is still to come; raises where the answer is an error."""
    with urllib.request.urlopen(_generate(base, prompt, new_tokens, stream=True), timeout=timeout) as answer:
        yield (json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: {"))


def post(url: str, body: dict[str, Any], *, timeout: float = 30) -> int:
    """POST; gives the HTTP status, raises where it is an error."""
    with urllib.request.urlopen(_post(url, body), timeout=timeout) as answer:
        return int(answer.status)


def compare(base: str, cases: list[Expected]) -> list[tuple[Expected, Answer]]:
    """Send every case and pair it with its answer."""
    return [(case, generate(base, case.prompt, len(case.tokens))) for case in cases]


def wrong(pairs: list[tuple[Expected, Answer]]) -> list[str]:
    """One line for each answer that is not the expected tokens."""
    return [
        f"HTTP {a.status}, tokens {list(a.tokens)} instead of {list(e.tokens)}: {a.body[:300]}"
        for e, a in pairs
        if a.status != 200 or a.tokens != e.tokens
    ]
