"""Runs under SGLang's own Python: what SGLang itself makes of command lines, on a machine that we describe.

Reads a JSON list of cases from stdin, writes a JSON list of answers to stdout. A case has `config` (a model's
config.json), `accelerator`, `argv`, `environment`, `fields` (settings to report) and perhaps `check` (the launcher's
further checks); its answer has `values`, or `error` where SGLang refuses. Nothing of SGLang is replaced:
`override_platform` is its own way to say which machine it is on, and only torch's question for the GPU's capability is
answered for it. This project's backend is among the choices, as its plugin adds it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

CAPABILITY = {
    "SM80": (8, 0),
    "SM89": (8, 9),
    "SM90": (9, 0),
    "SM100": (10, 0),
    "SM120": (12, 0),
    "ROCm": (9, 4),
}


def platform_of(accelerator: str) -> dict[str, Any]:
    """SGLang's platform facts of a machine with this accelerator."""
    hip = accelerator == "ROCm"
    major, minor = CAPABILITY[accelerator]
    return {
        "is_cuda": not hip,
        "is_hip": hip,
        "is_sm90": accelerator == "SM90",
        "is_hopper_with_cuda_12_3": accelerator == "SM90",
        "is_sm100": accelerator == "SM100",
        "is_sm120": accelerator == "SM120",
        "is_blackwell": accelerator in ("SM100", "SM120"),
        "has_flashinfer": not hip,
        "device_sm": 0 if hip else 10 * major + minor,
        "device_capability": (major, minor),
    }


@contextmanager
def machine(accelerator: str) -> Iterator[None]:
    """SGLang believes to be on it. The CPU is what it really is on."""
    from sglang.srt.runtime_context import override_platform

    if accelerator == "CPU":
        yield
        return
    capability = CAPABILITY[accelerator]
    with (
        override_platform(**platform_of(accelerator)),
        mock.patch("torch.cuda.get_device_capability", lambda *_a, **_k: capability),
        mock.patch("sglang.srt.utils.common.is_sm100_supported", lambda *_a, **_k: accelerator == "SM100"),
    ):
        yield


def resolve(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One case's answer."""
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.server_args import ServerArgs

    model = folder / str(abs(hash(json.dumps(case["config"], sort_keys=True))))
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(case["config"]))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    device = "cpu" if case["accelerator"] == "CPU" else "cuda"
    argv = ["--model-path", str(model), "--device", device, "--mem-fraction-static", "0.7", *case["argv"]]
    with mock.patch.dict(os.environ, case.get("environment", {})), machine(case["accelerator"]):
        try:
            args = ServerArgs.from_cli_args(parser.parse_args(argv))
            args.resolve_once()
            if case.get("check"):
                args.check_server_args()  # the launcher's second look
            return {"values": {name: resolution_result(args, name) for name in case["fields"]}}
        except (Exception, SystemExit) as refused:  # whatever SGLang raises is its answer
            return {"error": f"{type(refused).__name__}: {refused}"}


def main() -> None:
    logging.disable(logging.CRITICAL)
    cases = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # SGLang prints
    from sglang.srt.server_args import add_disagg_transfer_backend_choices

    add_disagg_transfer_backend_choices(["pdcluster"])
    with tempfile.TemporaryDirectory() as folder:
        answers = [resolve(case, Path(folder)) for case in cases]
    json.dump(answers, out, default=str)


if __name__ == "__main__":
    main()
