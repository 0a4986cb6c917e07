"""KV transfer between ranks, measured beside its rivals in one run. Nothing is asserted.

    python tests/bench [--quick] [--rounds N] [--only TEXT] [--no-sglang] [--json FILE]

Ours and raw NIXL run in the same processes over the same pools (one process and agent a rank, pools twice the request
or more, random pages), SGLang's own classes in theirs; every variant runs once a round, in shuffled order. A time goes
from the moment the first prefill rank hands its pages over, decode having named its own before, to the moment the last
decode rank knows that every byte is in place. Medians are shown, ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import handover
import machine
import report
import score
from group import Group, RankFailed, context
from measure import Bench, Measured
from rival_sglang import Sglang, environment
from shape import BULK, Load, full, quick

FAIR_ROUNDS = 5


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="tests/bench", description="KV transfer beside its rivals")
    parser.add_argument("--quick", action="store_true", help="fewer cells, about three minutes")
    parser.add_argument("--rounds", type=int, help="rounds of a 4096-token cell (5; quick: 3)")
    parser.add_argument(
        "--only", default="", help="cells whose label holds one of these texts, comma-separated: 'tcp 2-1'"
    )
    parser.add_argument("--no-sglang", action="store_true", help="leave SGLang's classes out")
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write all samples there; - is stdout, without the table"
    )
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    asked = arguments()
    table = sys.stderr if asked.json == "-" else sys.stdout

    def say(text: str = "") -> None:
        print(text, file=table, flush=True)

    def log(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    began = time.monotonic()
    plan = (quick if asked.quick else full)(**({"rounds": asked.rounds} if asked.rounds else {}))
    if asked.only:
        texts = asked.only.split(",")
        plan = replace(plan, cells=tuple(c for c in plan.cells if any(t in c.label for t in texts)), fairness=())
    folder = None if asked.no_sglang else environment()
    rival = Sglang(folder) if folder is not None else None
    made = context()
    found: list[Measured] = []
    fair: dict[str, list[list[float]]] = {}
    bench = Bench(lambda setup, strategies: Group(made, setup, strategies), rival, log)
    try:
        for setup, cells in plan.by_setup().items():
            found += bench.setup(setup, cells)
        for setup in plan.fairness:
            label = f"{setup.transport} 16 x {BULK // 16}t"
            try:
                fair[label] = bench.fairness(setup, Load(BULK // 16, 16), FAIR_ROUNDS)
            except RankFailed as error:
                log(f"fairness {label}: {error}")
    finally:
        if rival is not None:
            rival.close()
    picks = {p.label: p for m in found if (p := score.pick(m)) is not None and not m.cell.printed_only}
    judged = [
        *score.rate_bars(found),
        *score.count_bars(found),
        score.choice_bar(picks.values()),
        score.many_bar(found),
        score.fair_bar(fair),
    ]
    cores = os.cpu_count() or 1
    facts = machine.facts()
    say("\n".join(report.HEAD))
    for measured in found:
        say(report.row(measured, cores))
    say("\nTimes in ms; (1.20x): ours is 1.2 times as fast, median over rounds. Memory kind: host.")
    if rival is not None:
        say("* SGLang 0.5.23's own NIXL classes; at unequal TP with its refusal of host memory removed.")
    else:
        say("* not measured: " + ("left out" if asked.no_sglang else "make sglang-env was not run"))
    floor = handover.seconds(made)
    say(f"Hand-over floor (thread, one frame to another process, thread; no transfer): {floor * 1e3:.2f} ms.")
    say()
    say("\n".join(report.strategies(found, picks)))
    say()
    say("\n".join(report.bars(judged)))
    took = time.monotonic() - began
    copies = "compiled" if facts["compiled_copies"] else "torch's"
    say(f"\n{took:.0f} s; {facts['cpu']}, {facts['cores']} cores, load {facts['load']}; copies: {copies}")
    if asked.json:
        text = json.dumps(
            report.as_json(found, picks, judged, machine=facts, seconds=took, fairness=fair, handover=floor), indent=1
        )
        if asked.json == "-":
            print(text)
        else:
            Path(asked.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
