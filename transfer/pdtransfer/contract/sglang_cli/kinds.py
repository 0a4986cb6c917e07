"""How SGLang 0.5.23 takes the value of a flag: how many arguments, and what each is turned into."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Arity and type of one flag."""

    SWITCH = "switch"
    PAIR = "on/off pair"
    """A switch with a second name that turns it off (`--x`, `--no-x`)."""
    TEXT = "text"
    INT = "whole number"
    FLOAT = "number"
    TOKENS = "whole number or size"
    """A whole number that may end in k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024)."""
    JSON = "JSON"
    INTS = "whole numbers"
    FLOATS = "numbers"
    TEXTS = "texts"
    """One or more."""
    MAYBE_TEXTS = "no or more texts"
    MAYBE_TEXT = "no or one text"

    @property
    def takes_value(self) -> bool:
        """False for a switch."""
        return self not in (Kind.SWITCH, Kind.PAIR)


_SUFFIX = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+)(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)")


def tokens(text: str) -> int:
    """Value of a flag of kind TOKENS. Raises ArgumentTypeError for what SGLang refuses."""
    text = text.strip()
    found = _SIZE.fullmatch(text)
    if found is None:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number and no size such as 32k or 32Ki") from None
    whole, fraction, suffix = found.groups()
    if fraction and suffix.endswith("i"):
        raise argparse.ArgumentTypeError(f"{text!r}: only whole numbers go with {suffix}")
    return int(Decimal(whole + (fraction or "")) * _SUFFIX[suffix])


def parsed_json(text: str) -> Any:
    """Value of a flag of kind JSON. Raises ArgumentTypeError for what is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is not JSON: {error}") from None


_CONVERT: dict[Kind, Callable[[str], Any]] = {
    Kind.INT: int,
    Kind.INTS: int,
    Kind.FLOAT: float,
    Kind.FLOATS: float,
    Kind.TOKENS: tokens,
    Kind.JSON: parsed_json,
}
_NARGS = {Kind.INTS: "+", Kind.FLOATS: "+", Kind.TEXTS: "+", Kind.MAYBE_TEXTS: "*", Kind.MAYBE_TEXT: "?"}


def argparse_options(kind: Kind) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for this kind, without names, destination and choices."""
    if kind is Kind.SWITCH:
        return {"action": "store_true"}
    if kind is Kind.PAIR:
        raise ValueError("a pair is two switches")
    options: dict[str, Any] = {"type": _CONVERT.get(kind, str)}
    if kind in _NARGS:
        options["nargs"] = _NARGS[kind]
    return options
