"""`python -m pdtransfer.install TARGET`: copies the plugin to TARGET and says what it copied."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pdtransfer
from pdtransfer.install.bundle import collect, installed_version
from pdtransfer.install.place import place


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: TARGET holds the plugin; 1: it can not, with one line that says why; 2: bad usage."""
    parser = argparse.ArgumentParser(prog="python -m pdtransfer.install", description=__doc__)
    parser.add_argument("target", type=Path, help="a folder of its own; it is made, or replaced by this version")
    target: Path = parser.parse_args(argv).target.absolute()
    bundle = collect(Path(pdtransfer.__file__).parent, installed_version())
    try:
        written = place(bundle, target)
    except OSError as failed:
        print(f"pdtransfer.install failed: {failed}", file=sys.stderr)
        return 1
    size = sum(map(len, bundle.files.values()))
    compiled = ", ".join(name.rpartition("/")[2] for name in bundle.compiled) or "none"
    print(
        f"pdtransfer {bundle.version} {'copied to' if written else 'is already in'} {target}: {len(bundle.files)} "
        f"files, {size / 1e6:.1f} MB; compiled, and overlooked by Pythons it is not for: {compiled}"
    )
    for name in bundle.skipped:
        print(f"left out {name}: its name does not say which Python it is for")
    return 0


if __name__ == "__main__":
    sys.exit(main())
