"""Preflight from outside speaks of SGLang's flags: nothing that only a PDCluster's spec has is advised."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pdtransfer.contract.compat
from pdoperator.domain.flag_words import in_flags
from pdtransfer.contract.sglang_cli import meant

FIELD = re.compile(r"(?<![\w-])(?:spec\.|transfer\.|kvCache|hostKV|hierarchicalCache|extraArgs|replicas\b|[a-z]+[A-Z])")


def texts() -> list[str]:
    """Every text in the rules that is long enough to be part of what to do."""
    found = set()
    for file in Path(pdtransfer.contract.compat.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "change":
                found |= {
                    n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
    return sorted(t for t in found if " " in t)


def test_no_advice_names_a_field_of_a_spec() -> None:
    every = texts()
    assert len(every) > 80 and sum(bool(FIELD.search(t)) for t in every) > 20  # the control: they do name fields
    assert [in_flags(t) for t in every if FIELD.search(in_flags(t))] == []


def test_every_flag_that_is_advised_is_one_of_sglangs() -> None:
    flags = {f for t in texts() for f in re.findall(r"--[a-z][a-z-]+[a-z](?![\w-])", in_flags(t))}
    assert len(flags) > 15
    assert {f for f in flags if meant(f) != (f,)} == set()


@pytest.mark.parametrize(
    "action, told",
    [
        ("set kvCache.dtype, so that both", "set --kv-cache-dtype, so that both"),
        ("with transfer.backend NIXL or Mooncake", "with --disaggregation-transfer-backend nixl or mooncake"),
        ("or spec.transfer.plugin.parameters", "or SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"),
        ("use equal TP", "use equal TP"),
    ],
)
def test_fields_become_flags(action: str, told: str) -> None:
    assert in_flags(action) == told
