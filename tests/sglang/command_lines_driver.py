"""Runs under SGLang's own Python: what SGLang's command line makes of the lines that the operator composes.

Reads one JSON object from stdin, writes one to stdout. In: `lines`, a list of {argv, accelerator?}, and `spellings`,
a list of arguments. Out: `flags`, every flag as {setting: [names]}; `defaults`, the settings of a line with nothing
but a model; `lines`, for each {values} as parsed, and where an accelerator was named {resolved} or {error}, SGLang's
own resolution on such a machine; `meant`, for each spelling the settings that argparse would take it for.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from typing import Any

from resolve_driver import machine


def _values(record: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.arg_utils import record_fields

    return {f.name: getattr(record, f.name) for f in record_fields(type(record)) if not f.name.startswith("_")}


def _resolved(record: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolution_result

    return {name: resolution_result(record, name) for name in _values(record)}


def _line(line: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    try:
        record = prepare_server_args(line["argv"])
    except SystemExit as refused:
        return {"refused": str(refused)}
    answer: dict[str, Any] = {"values": _values(record)}
    if "accelerator" in line:
        environment = dict(os.environ)
        try:
            with machine(line["accelerator"]):
                record.resolve_once()
                record.check_server_args()
            answer["resolved"] = _resolved(record)
        except (Exception, SystemExit) as refused:  # whatever SGLang raises is its answer
            answer["error"] = f"{type(refused).__name__}: {refused}"
        os.environ.clear()
        os.environ.update(environment)
    return answer


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # SGLang prints
    from sglang.srt.server_args import ServerArgs, add_disagg_transfer_backend_choices

    add_disagg_transfer_backend_choices(["pdcluster"])  # as the plugin's register does
    asked = json.load(sys.stdin)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags: dict[str, list[str]] = {}
    for action in parser._actions:
        flags.setdefault(action.dest, []).extend(action.option_strings)
    by_name = {name: dest for dest, names in flags.items() for name in names}

    def meant(spelling: str) -> list[str]:
        name = spelling.partition("=")[0]
        if name in by_name:
            return [by_name[name]]
        return sorted({found[0].dest for found in parser._get_option_tuples(spelling)})

    answer = {
        "flags": flags,
        "defaults": _line({"argv": ["--model-path", "m"]})["values"],
        "lines": [_line(line) for line in asked["lines"]],
        "meant": {spelling: meant(spelling) for spelling in asked["spellings"]},
    }
    logging.disable(logging.CRITICAL)
    json.dump(answer, out, default=str)


if __name__ == "__main__":
    main()
