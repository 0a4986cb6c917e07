"""The comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_compare_faults import Fault
from sglang_compare_pairs import Measured, Work, median


def shape_table(measured: Iterable[Measured], work: Work) -> list[str]:
    """One row a pair."""
    lines = [
        f"Prompts of {work.timed_tokens} tokens are timed, one request at a time; medians, ms.",
        "",
        "| TP prefill -> decode | backend | tokens right | first token | KV transfer | MiB | what a user sees |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in sorted(measured, key=_place):
        sees = "answers"
        if one.failed:
            sees = f"{one.failed} after {one.failed_seconds:.0f} s; {one.healthy_after}".rstrip("; ")
        elif one.wrong:
            sees = "WRONG TOKENS: " + "; ".join(one.wrong)
        cells = (
            one.shape,
            one.backend,
            f"{one.right} of {one.checked}",
            _ms(median(one.first_token_ms)),
            _ms(median(one.transfer_ms)),
            f"{one.transfer_mb:.0f}" if one.transfer_mb else "-",
            _cell(sees),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def fault_table(faults: Iterable[Fault], cap: float) -> list[str]:
    """One row a fault and backend."""
    lines = [
        f"Waits are cut off after {cap:.0f} s; SGLang's own limit for a stuck request is set to {cap / 2:.0f} s here "
        "(its default: 300 s).",
        "",
        "| fault | backend | client knows after | what it is told | then |",
        "|---|---|---|---|---|",
    ]
    for one in sorted(faults, key=lambda f: f.name):
        seconds = f"not within {cap:.0f} s" if one.seconds is None else f"{one.seconds:.1f} s"
        lines.append(f"| {one.name} | {one.backend} | {seconds} | {_cell(one.user)} | {_cell(one.then)} |")
    return lines


def _place(one: Measured) -> tuple[bool, int, str]:
    """Equal TP first, small before large."""
    equal = one.prefill_tp == one.decode_tp
    return not equal, one.prefill_tp if equal else -one.prefill_tp, one.backend


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
