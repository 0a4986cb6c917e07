"""Runs in SGLang's environment: parses command lines with SGLang's own parser, one JSON object a line.

In: {"argv": [...]}. Out: {"values": {setting: value}} or {"refused": text}. {"table": true} answers every action."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from typing import Any


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # What SGLang prints is no answer.
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)

    def parse(argv: list[str]) -> dict[str, Any]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                if "--config" in argv:
                    argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
                return {"values": vars(parser.parse_args(argv))}
        except SystemExit as end:
            return {"refused": f"{end.code}: {said.getvalue()}"}
        except ValueError as error:
            return {"refused": str(error)}

    def table() -> list[dict[str, Any]]:
        return [
            {
                "names": a.option_strings,
                "dest": a.dest,
                "action": type(a).__name__,
                "nargs": a.nargs,
                "type": getattr(a.type, "__name__", None),
                "default": None if a.default is argparse.SUPPRESS else a.default,
                "choices": None if a.choices is None else [str(c) for c in a.choices],
            }
            for a in parser._actions
        ]

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = {"table": table()} if asked.get("table") else parse(asked["argv"])
        print(json.dumps(answer, default=str), file=answers, flush=True)


main()
