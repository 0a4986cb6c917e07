"""What the comparisons of families A to D with SGLang share: pairs as facts, a rule's word, SGLang's answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from kit_abcd_cases import ASKED, MLA, Case, model
from kit_driver import ask_driver

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat import check
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import ModelGeometry

RUN_S = 300
TP, PP, CP = "tensor_parallel", "pipeline_parallel", "context_parallel"


def facts(role: Role, geometry: ModelGeometry, **more: Any) -> RoleFacts:
    base: Case = {
        "geometry": geometry,
        "engine_version": "0.5.23",
        "model_name": "m",
        "model_dtype": "bfloat16",
        "page_size": 16,
        "kv_dtype": "bfloat16",
        "accelerator": Accelerator.SM90,
    }
    return RoleFacts(role=role, **(base | more)).with_launch_defaults()


def word(rule: str, geometry: ModelGeometry, p: Case, d: Case, backend: Backend = Backend.NIXL) -> str:
    """Outcome word of one rule for a pair; '' where it passes."""
    finding = check(facts(Role.PREFILL, geometry, **p), facts(Role.DECODE, geometry, **d), backend).finding(rule)
    assert finding is not None, f"{rule} was not decided"
    return finding.severity


def kind_of(name: str) -> ModelGeometry:
    linear = tuple(i for i in range(36) if i % 4)
    return {"gqa": model(), "mla": model(MLA), "hybrid": model(MLA, linear_layers=linear)}[name]


def differ(found: Iterable[tuple[Any, object, object]]) -> list[tuple[Any, object, object]]:
    """Cases where the rule's word (second) is not what SGLang's code did (third)."""
    rows = list(found)
    assert rows
    return [row for row in rows if row[1] != row[2]]


Answers = Callable[[str, Iterable[Case]], list[tuple[Case, Case]]]


@functools.cache
def answers() -> dict[str, dict[str, Any]]:
    """SGLang's answers to all cases, from one process of its own Python: part -> case as JSON -> answer."""
    told = ask_driver("abcd_driver.py", ASKED, RUN_S)
    return {
        part: {json.dumps(case, sort_keys=True): answer for case, answer in zip(cases, told[part], strict=True)}
        for part, cases in ASKED.items()
    }


def sglang(part: str, cases: Iterable[Case]) -> list[tuple[Case, Case]]:
    """(case, SGLang's answer), in order."""
    return [(case, answers()[part][json.dumps(case, sort_keys=True)]) for case in cases]
