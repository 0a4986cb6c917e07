"""kit_resolve.py as a server's start goes on: with the check of the resolved arguments, and with this project's backend
name among SGLang's choices, as its plugin adds it. Runs under SGLang's own Python."""

from __future__ import annotations

import sys

import kit_resolve
from sglang.srt.server_args import ServerArgs, add_disagg_transfer_backend_choices

if __name__ == "__main__":
    add_disagg_transfer_backend_choices(["pdcluster"])
    resolve = ServerArgs.resolve_once

    def resolve_and_check(args: ServerArgs) -> None:
        """As launch_server does: what is refused only once everything is resolved."""
        resolve(args)
        args.check_server_args()

    ServerArgs.resolve_once = resolve_and_check
    out = sys.stdout
    kit_resolve.main()
    out.flush()
