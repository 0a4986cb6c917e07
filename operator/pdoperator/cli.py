"""`pdcluster`: what a person runs without a cluster. `preflight` says whether prefill and decode fit.

Exit codes of preflight: 0 what was asked about fits, 1 it does not, 2 the input can't be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pdoperator.cli_preflight import add_preflight, run_preflight


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
    args = parser.parse_args(argv)
    if args.command == "version":
        print(version())
        return 0
    return run_preflight(check, args)


if __name__ == "__main__":
    raise SystemExit(main())
