"""How messages spell numbers: one pair, two pairs; rates in the unit that shows their digits."""

from __future__ import annotations


def count(number: int, one: str, many: str = "") -> str:
    """`1 pair`, `2 pairs`; `many` where adding an s is not enough."""
    return f"{number} {one if number == 1 else many or one + 's'}"


_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def rate(bytes_per_second: float) -> str:
    """`39.1 GB/s`, `7.02 MB/s`, `512 B/s`: three digits, decimal units; never a rounded-away 0.00."""
    for size, unit in _UNITS:
        # 999.6 MB/s would be printed as 1e+03 MB/s: it is 1 GB/s.
        if bytes_per_second >= 0.9995 * size:
            return f"{_three(bytes_per_second / size)} {unit}"
    return f"{bytes_per_second:.0f} B/s"


def _three(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
