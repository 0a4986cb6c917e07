"""`pdcluster`: what a person runs without a cluster. `preflight` says whether prefill and decode fit.

Exit codes of preflight: 0 what was asked about fits, 1 it does not, 2 the input can't be read.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from pdoperator.cli_preflight import add_preflight, run_preflight

BROKEN_PIPE = 141
"""Exit code where nobody reads the answer, as of a program that SIGPIPE ends."""


def version() -> str:
    """Version of the installed distribution, or of the source tree where it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("pdcluster")
    except PackageNotFoundError:
        return "0.1.0+source"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `pdcluster`."""
    parser = argparse.ArgumentParser(prog="pdcluster", description="Tools for PDClusters.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = add_preflight(commands)
    commands.add_parser("version", help="print the version")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names and answers of servers hold what the terminal's encoding may not have.
            stream.reconfigure(errors="backslashreplace")
    args = parser.parse_args(argv)
    if args.command == "version":
        print(version())
        return 0
    try:
        code = run_preflight(check, args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it (`| head`) has seen enough; Python must not find that out again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


if __name__ == "__main__":
    raise SystemExit(main())
