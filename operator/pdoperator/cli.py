"""`pdcluster`: what a person runs without a cluster. `preflight` says whether a manifest fits.

Exit codes of preflight: 0 every PDCluster fits, 1 one does not, 2 the file can't be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pdoperator.api import names
from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.validation import manifest_problems
from pdoperator.domain.preflight import Finding, Preflight, preflight
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.hf_config import read_geometry

FITS, DOES_NOT_FIT, UNREADABLE = 0, 1, 2


class Unreadable(Exception):
    """The input is no manifest; the message says why."""


def read_manifests(text: str) -> list[dict[str, Any]]:
    """PDClusters of a file of one or more YAML (or JSON) documents; other kinds are passed over."""
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as e:
        raise Unreadable(f"it is not YAML: {e}") from e
    flat: list[Any] = []
    for document in documents:
        if isinstance(document, dict) and isinstance(document.get("items"), list):
            flat += document["items"]
        else:
            flat.append(document)
    if not all(isinstance(d, dict) for d in flat):
        raise Unreadable("a document is not an object")
    found = [d for d in flat if d.get("kind") == names.KIND]
    if not found:
        raise Unreadable(f"it holds no {names.KIND}")
    return found


def local_geometry(source: str | None) -> ModelGeometry | None:
    """Geometry from config.json when the model's source is a folder on this machine."""
    if not source:
        return None
    config = Path(source) / "config.json"
    if not config.is_file():
        return None
    try:
        return read_geometry(json.loads(config.read_text()))
    except (ValueError, OSError) as e:
        raise Unreadable(f"{config}: {e}") from e


def check_manifest(manifest: dict[str, Any]) -> Preflight:
    """Preflight of one manifest: what the API server would refuse, then what does not fit."""
    refused = tuple(
        Finding("InvalidSpec", "Fail", problem, "Correct the field; kubectl explain pdc.spec describes it.")
        for problem in manifest_problems(manifest)
    )
    try:
        spec = PDClusterSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as e:
        if refused:
            return Preflight(refused)
        return Preflight(
            tuple(
                Finding("InvalidSpec", "Fail", f"spec.{'.'.join(str(p) for p in err['loc'])}: {err['msg']}")
                for err in e.errors(include_url=False, include_context=False, include_input=False)
            )
        )
    return Preflight(refused + preflight(spec, local_geometry(spec.model.source)).findings)


def _name(manifest: dict[str, Any]) -> str:
    meta = manifest.get("metadata") or {}
    return str(meta.get("name", "(no name)")) if isinstance(meta, dict) else "(no name)"


def as_text(name: str, result: Preflight) -> str:
    """For people: the verdict, then every finding that is not Pass."""
    passed = len(result.of("Pass"))
    lines = [f"{name}: {result.verdict}, {passed} rules pass"]
    for status in ("Fail", "Unknown", "Warn"):
        for f in result.of(status):
            lines.append(f"  {f.status:7} {f.rule:12} {f.message}")
            if f.action:
                lines.append(f"          {'':12} -> {f.action}")
    return "\n".join(lines)


def as_dict(results: list[tuple[str, Preflight]]) -> dict[str, Any]:
    """{"verdict", "findings"}; with several PDClusters the worst verdict and all findings, each
    message led by the name."""
    if len(results) == 1:
        only = results[0][1]
        return {"verdict": only.verdict, "findings": [f.to_dict() for f in only.findings]}
    verdicts = {r.verdict for _, r in results}
    worst = next(v for v in ("Fail", "Unknown", "Pass") if v in verdicts)
    findings = [
        f.to_dict() | {"message": f"{name}: {f.message}".rstrip(": ")} for name, r in results for f in r.findings
    ]
    return {"verdict": worst, "findings": findings}


def run_preflight(path: str, output: str) -> int:
    """Read, check, print; the exit code."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        results = [(_name(m), check_manifest(m)) for m in read_manifests(text)]
    except (OSError, UnicodeDecodeError, Unreadable) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        print(f"pdcluster preflight: {path} can not be read: {why}", file=sys.stderr)
        return UNREADABLE
    if output == "json":
        print(json.dumps(as_dict(results), indent=2))
    else:
        print("\n".join(as_text(name, r) for name, r in results))
    return DOES_NOT_FIT if any(r.verdict == "Fail" for _, r in results) else FITS


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
    check = commands.add_parser("preflight", help="say whether prefill and decode of a PDCluster fit")
    check.add_argument("-f", "--filename", required=True, help="file with PDClusters, or - for standard input")
    check.add_argument("-o", "--output", choices=("text", "json"), default="text")
    commands.add_parser("version", help="print the version")
    args = parser.parse_args(argv)
    if args.command == "version":
        print(version())
        return 0
    return run_preflight(args.filename, args.output)


if __name__ == "__main__":
    raise SystemExit(main())
