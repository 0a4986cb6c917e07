"""extraArgs with which a pod never serves, and those that only the pod knows: told before a pod is launched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from preflight_kit import DECODE, PREFILL, Run, failing

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.facts import role_facts
from pdoperator.domain.finding import Finding
from pdoperator.domain.preflight import preflight
from pdtransfer.contract.base import Role

EXAMPLE = yaml.safe_load((Path(__file__).parents[2] / "examples" / "sglang.yaml").read_text())["spec"]


def spec(*extra: str, env: list[dict[str, Any]] | None = None) -> PDClusterSpec:
    changed = copy.deepcopy(EXAMPLE)
    changed["decode"] |= {"extraArgs": list(extra), "env": env or []}
    return PDClusterSpec.model_validate(changed)


def found(*extra: str) -> list[Finding]:
    return [f for f in preflight(spec(*extra)).findings if f.rule in ("EngineFlag", "PodVariable")]


@pytest.mark.parametrize(
    "extra", [["--help"], ["-h"], ["--grpc-mode"], ["--smg-grpc-mode"], ["--ssl-certfile", "x"], ["--ssl-keyfile=$(K)"]]
)
def test_flags_with_which_a_pod_never_gets_ready_fail(extra: list[str]) -> None:
    (finding,) = [f for f in found(*extra) if f.status == "Fail"]
    assert finding.message.startswith("spec.decode.extraArgs: ") and finding.action == "Remove it."


@pytest.mark.parametrize(
    "extra, says",
    [
        (["--attn-cp-size", "$(N)"], "only the pod knows the value of --attn-cp-size"),
        (["$(MORE)"], "only the pod knows what $(MORE) is"),
        (["--cuda-graph-bs-decode", "1", "$(N)"], ""),
        (["--mem-fraction-static", "$(M)"], ""),
        (["--chunked-prefill-size=$(N)"], ""),  # The facts are open then, and the rules say so.
    ],
)
def test_what_only_the_pod_knows_is_told_where_a_rule_decides_on_it(extra: list[str], says: str) -> None:
    findings = found(*extra)
    assert [f.status for f in findings] == (["Warn"] if says else [])
    assert all(says in f.message for f in findings)


def test_a_value_that_only_the_pod_knows_is_not_taken_for_the_default() -> None:
    assert role_facts(spec(), Role.DECODE).attention_backend == ""
    facts = role_facts(spec("--attention-backend", "$(A)", "--chunked-prefill-size", "$(N)"), Role.DECODE)
    assert facts.attention_backend is None and facts.chunked_prefill_size is None and not facts.whole_command


def test_what_kubernetes_does_not_expand_is_refused_as_sglang_refuses_it() -> None:
    # A shell would put something in place of $N; nothing in a pod does.
    (finding,) = found("--chunked-prefill-size", "$N")
    assert finding.status == "Fail" and "invalid int value: '$N'" in finding.message


def test_a_command_line_that_asks_for_help_does_not_serve(run: Run) -> None:
    code, out = run("--prefill-args", f"{PREFILL} --help", "--decode-args", DECODE)
    assert code == 1 and "EngineFlag" in failing(out)
