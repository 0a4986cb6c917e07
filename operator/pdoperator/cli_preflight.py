"""Options of `pdcluster preflight`, and what each way of asking runs: a manifest, command lines, servers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from pdoperator.cli_commands import CommandOptions, check_commands
from pdoperator.cli_files import read_text
from pdoperator.cli_http import BadKey, api_key
from pdoperator.cli_manifests import check_manifest, name_of, read_manifests
from pdoperator.cli_output import UNREADABLE, Unreadable, as_dict, as_text, exit_code, outside_dict, outside_text
from pdoperator.cli_servers import ServerOptions, check_servers
from pdoperator.domain.preflight_outside import Outside, Stated
from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.sglang_cli import READ_FROM

TIMEOUT = 10.0
"""Seconds."""
_DESCRIPTION = f"""\
Says whether prefill and decode fit, before a request finds out. Ask about one of:
  -f FILE                               PDClusters in a manifest
  --prefill-args TEXT --decode-args TEXT  two SGLang command lines, read as SGLang {READ_FROM} reads them
  --server URL --server URL             running servers, asked for what they really use
Exit codes: 0 fits (warnings and unknowns are printed), 1 does not fit, 2 can't be read."""

_EXAMPLES = """\
examples:
  pdcluster preflight -f cluster.yaml
  pdcluster preflight --prefill-args 'python -m sglang.launch_server --model-path m --tp 4 \\
      --disaggregation-mode prefill' --decode-args @decode.sh --model-config m/config.json
  pdcluster preflight --server http://prefill-0:30000 --server http://decode-0:30000
A text that begins with @ names a file: a script, a Dockerfile, or a Kubernetes manifest.
A text that is one flag only needs a '=': --prefill-args=--tp=2"""


def _gpu(text: str) -> Accelerator:
    found = next((a for a in Accelerator if a.value.lower() == text.lower()), None)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(a.value for a in Accelerator)}")
    return found


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("a whole number from 0 on")
    return value


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError("from 0 to 600 seconds")
    return value


def add_preflight(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's parser. `commands` is what `add_subparsers` gave."""
    check: argparse.ArgumentParser = commands.add_parser(
        "preflight",
        help="say whether prefill and decode fit",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("-f", "--filename", help="file with PDClusters, or - for standard input")
    check.add_argument("--prefill-args", metavar="TEXT", help="prefill's command line, or @FILE with it")
    check.add_argument(
        "--decode-args",
        action="append",
        metavar="TEXT",
        help="decode's command line, or @FILE with it; once for each decode group that prefill serves",
    )
    check.add_argument(
        "--server",
        action="append",
        metavar="URL",
        help="a running server; twice or more often, in any order: one prefill and its decodes (PDCLUSTER_API_KEY)",
    )
    check.add_argument("--model-config", metavar="FILE", help="the model's config.json, for rules about its KV")
    check.add_argument("--engine-version", metavar="V", help="SGLang's version, where command lines are checked")
    check.add_argument("--gpu", type=_gpu, help="of both sides: " + ", ".join(a.value for a in Accelerator))
    check.add_argument("--prefill-gpu", type=_gpu, help="of prefill, instead of --gpu")
    check.add_argument("--decode-gpu", type=_gpu, help="of decode, instead of --gpu")
    check.add_argument(
        "--max-top-logprobs",
        type=_count,
        metavar="N",
        help="most top_logprobs that a request can ask for, where something in front of the engines refuses more",
    )
    check.add_argument(
        "--nixl-plugins", type=_names, metavar="A,B", help="plugins that NIXL finds in the engines' images"
    )
    check.add_argument("--same-host", action="store_true", help="both command lines run on one host")
    check.add_argument("--timeout", type=_seconds, metavar="S", help=f"for each question to a server ({TIMEOUT:g})")
    check.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return check


_GPUS = ("--gpu", "--prefill-gpu", "--decode-gpu")
_NOT_FOR = {
    "-f": (*_GPUS, "--engine-version", "--same-host", "--max-top-logprobs", "--nixl-plugins", "--timeout"),
    "--prefill-args": ("--timeout",),
    "--server": (*_GPUS, "--engine-version", "--same-host"),
}
"""What a way of asking does not take: a manifest and a running server tell it themselves."""


def run_preflight(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Read, check, print; the exit code."""
    commands = args.prefill_args is not None or args.decode_args is not None
    ways = [args.filename is not None, commands, bool(args.server)]
    if sum(ways) != 1:
        parser.error("one of -f, --prefill-args with --decode-args, or --server twice is needed")
    if commands and (args.prefill_args is None or args.decode_args is None):
        parser.error("--prefill-args and --decode-args are both needed")
    if args.server and len(args.server) < 2:
        parser.error("--server is needed twice: one prefill and one decode server")
    way = "-f" if args.filename is not None else "--prefill-args" if commands else "--server"
    for option in _NOT_FOR[way]:
        if getattr(args, option.removeprefix("--").replace("-", "_")) not in (None, False):
            parser.error(f"{option} has no effect with {way}")
    named = [args.filename, args.model_config, *(t[1:] for t in _texts(args) if t.startswith("@"))]
    if named.count("-") > 1:
        parser.error("standard input can be read for one of them only")
    try:
        if args.filename is not None:
            return _manifests(args)
        outside = _commands(args) if commands else _servers(args)
    except Unreadable as error:
        print(f"pdcluster preflight: {error}", file=sys.stderr)
        return UNREADABLE
    print(json.dumps(outside_dict(outside), indent=2) if args.output == "json" else outside_text(outside))
    return exit_code([pair.result for pair in outside])


def _texts(args: argparse.Namespace) -> list[str]:
    return [t for t in (args.prefill_args, *(args.decode_args or [])) if t is not None]


def _manifests(args: argparse.Namespace) -> int:
    text = read_text(args.filename)
    try:
        results = [(name_of(m), check_manifest(m, args.model_config)) for m in read_manifests(text)]
    except Unreadable as error:
        raise Unreadable(f"{args.filename} can not be read: {error}") from error
    if args.output == "json":
        print(json.dumps(as_dict(results), indent=2))
    else:
        print("\n".join(as_text(name, result) for name, result in results))
    return exit_code([result for _, result in results])


def _commands(args: argparse.Namespace) -> list[Outside]:
    options = CommandOptions(args.model_config, args.engine_version, args.same_host)
    return check_commands(
        args.prefill_args,
        args.decode_args,
        options,
        _stated(args),
        prefill_gpu=args.prefill_gpu or args.gpu,
        decode_gpu=args.decode_gpu or args.gpu,
    )


def _servers(args: argparse.Namespace) -> list[Outside]:
    try:
        key = api_key(os.environ.get("PDCLUSTER_API_KEY", ""))
    except BadKey as error:
        raise Unreadable(f"PDCLUSTER_API_KEY can not be read: {error}") from None
    options = ServerOptions(args.timeout or TIMEOUT, key, args.model_config)
    return check_servers(args.server, options, _stated(args))


def _stated(args: argparse.Namespace) -> Stated:
    return Stated(args.max_top_logprobs, args.nixl_plugins)
