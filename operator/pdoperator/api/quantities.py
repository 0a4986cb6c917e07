"""Kubernetes quantities and int-or-percent values, as numbers."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_SUFFIXES: dict[str, Decimal] = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_SHAPE = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([KMGTPE]i|[numkMGTPE]?)")


LARGEST = Decimal(2**63 - 1)
"""Kubernetes takes what is more for this."""


def parse_quantity(text: str | int) -> Decimal:
    """Value of a Kubernetes quantity: '10G' -> 10000000000, '1.5Gi' -> 1610612736, '100m' -> 0.1, '1e99' -> LARGEST.
    Raises ValueError with the text."""
    found = _SHAPE.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity (examples: 10G, 64Gi, 500m)")
    try:
        return max(-LARGEST, min(LARGEST, Decimal(found[1]) * _SUFFIXES[found[2]]))
    except ArithmeticError as error:
        raise ValueError(f"{text!r} is not a quantity") from error


def scaled(value: int | str, total: int, *, round_up: bool) -> int:
    """An int-or-percent value against `total`, as Deployments count maxSurge (up) and maxUnavailable (down).
    Raises ValueError for a text that is neither."""
    text = str(value)
    if re.fullmatch(r"[0-9]{1,3}%", text):
        share = total * int(text[:-1]) / 100
        return math.ceil(share) if round_up else math.floor(share)
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{value!r} is neither a number nor a percentage")
    return int(text)
