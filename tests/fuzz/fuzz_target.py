"""What is fuzzed, and how findings are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError


@dataclass(frozen=True)
class Target:
    """`corpus` are valid inputs; `run` takes any bytes."""

    corpus: tuple[bytes, ...]
    run: Callable[[bytes], str]


def words(error: ValidationError) -> str:
    """Which checks refused, and roughly where."""
    found = sorted({f"{e['type']}@{'.'.join(str(p)[:12] for p in e['loc'][:2])}" for e in error.errors()[:4]})
    return "refused " + " ".join(found)


def text(value: BaseModel) -> bytes:
    return value.model_dump_json().encode()


LOOP = asyncio.new_event_loop()
"""Where the asynchronous ones run."""
