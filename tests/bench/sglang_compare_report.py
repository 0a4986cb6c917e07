"""The comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_compare_faults import DECODE_DIES, DTYPE, FABRIC, NO_RDMA, PAGE_SIZE, PREFILL_DIES, UNEQUAL, Fault
from sglang_compare_pairs import Measured, median
from sglang_compare_parts import SHAPES, Result
from sglang_compare_words import RIGHT

ORDER = (
    *(UNEQUAL.format(*shape) for shape in SHAPES if shape[0] != shape[1]),
    *(PAGE_SIZE, DTYPE, FABRIC, NO_RDMA, PREFILL_DIES, DECODE_DIES),
)


def shape_table(results: Sequence[Result]) -> list[str]:
    """One row a pair."""
    lines = [
        "One request at a time; medians in ms, in brackets fastest and slowest; load average before and after.",
        "",
        "| TP prefill -> decode | backend | tokens right | first token | KV transfer | MiB | what a user sees | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one, ran in ((m, r.conditions) for r in results for m in r.pairs):
        sees = "answers"
        if one.failed:
            sees = "an error (below)" if one.failed_seconds is not None else one.failed
        elif one.wrong:
            sees = "; ".join(one.wrong)
        cells = (
            one.shape,
            one.backend,
            f"{one.right} of {one.checked}",
            _ms(one.first_token_ms, 0),
            _ms(one.transfer_ms, 1),
            f"{one.transfer_mb:.0f}" if one.transfer_mb else "-",
            _cell(sees),
            f"{ran['load_before']}-{ran['load_after']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def fault_table(results: Sequence[Result]) -> list[str]:
    """One row a fault and backend."""
    found = [f for r in results for f in r.faults] + [f for r in results for m in r.pairs for f in _unequal(m)]
    caps = sorted({float(r.conditions["cap_seconds"]) for r in results})
    lines = [
        f"Waits are cut off after {_list(caps)} s; SGLang's own limit for a stuck request is set to "
        f"{_list(cap / 2 for cap in caps)} s here (its default: 300 s).",
        "",
        "| fault | backend | client knows after | what it is told | then |",
        "|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda f: ORDER.index(f.name)):
        seconds = f"not within {_list(caps)} s" if one.seconds is None else f"{one.seconds:.1f} s"
        lines.append(f"| {one.name} | {one.backend} | {seconds} | {_cell(one.user)} | {_cell(one.then)} |")
    return lines


def condition_lines(results: Sequence[Result]) -> list[str]:
    """What all of it ran under; each part's own is in the JSON."""
    every = [r.conditions for r in results]
    if not every:
        return []

    def said(name: str) -> str:
        return ", ".join(sorted({str(c[name]) for c in every}))

    loads = [load for c in every for load in (c["load_before"], c["load_after"])]
    return [
        f"{len(every)} parts, {min(c['at'] for c in every)} to {max(c['at'] for c in every)} UTC, "
        f"{sum(c['seconds'] for c in every)} s in all; commit {said('commit')}; SGLang {said('sglang')}, nixl "
        f"{said('nixl')}; {said('cores')} cores, load {min(loads)} to {max(loads)}; {said('rounds')} timed requests of "
        f"{said('prompt_tokens')} tokens a pair."
    ]


def _unequal(one: Measured) -> list[Fault]:
    """A pair of unequal TP is the first fault, where it can not serve."""
    if one.prefill_tp == one.decode_tp or not one.checked:
        return []
    name = UNEQUAL.format(one.prefill_tp, one.decode_tp)
    if one.failed:
        return [Fault(one.backend, name, one.failed_seconds, one.failed, one.then)]
    user = RIGHT if not one.wrong else "; ".join(one.wrong)
    return [Fault(one.backend, name, one.answer_seconds, user, "it goes on serving")]


def _ms(values: Sequence[float], digits: int) -> str:
    middle = median(list(values))
    return "-" if middle is None else f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _list(values: Iterable[float]) -> str:
    return " or ".join(f"{v:.0f}" for v in values)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
