"""The command lines that the operator composes, read by SGLang 0.5.23's own parser and resolved by SGLang itself.

Expected values are written down by hand (kit_line_cases); what is not expected has to be SGLang's default.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kit_line_cases import BOTH, CASES, REFUSED, Case
from kit_specs import ANSWER_S, arguments, ask_sglang, make_models, manifest, spec_of

from pdoperator.api.validation import manifest_problems
from pdoperator.domain.engine_flags import OWNED, owned_flag
from pdoperator.domain.preflight import preflight
from pdtransfer.contract.base import Role
from pdtransfer.engines.reference import options as reference_options

pytestmark = pytest.mark.timeout(ANSWER_S)


def spellings() -> list[str]:
    """Every beginning of every owned flag, from two letters on."""
    names = {name for flag in OWNED for name in flag.names}
    return sorted({name[:length] for name in names for length in range(4, len(name) + 1)})


@dataclass(frozen=True)
class Answers:
    """What SGLang said, and the model folder of each kind."""

    flags: dict[str, list[str]]
    defaults: dict[str, Any]
    lines: dict[tuple[str, Role], dict[str, Any]]
    meant: dict[str, list[str]]
    models: dict[str, str]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    models = make_models(tmp_path_factory.mktemp("models"))
    keys, lines = [], []
    for case in (*CASES, *REFUSED):
        for role in Role:
            keys.append((case.name, role))
            line: dict[str, Any] = {"argv": arguments(case.spec, role, models[case.model], case.place)}
            lines.append(line | ({} if case.fits is None else {"accelerator": "SM90"}))
    said = ask_sglang(lines, spellings())
    answers = dict(zip(keys, said["lines"], strict=True))
    return Answers(said["flags"], said["defaults"], answers, said["meant"], models)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglang_reads_what_the_spec_says_and_nothing_else(sglang: Answers, case: Case, role: Role) -> None:
    source = sglang.models[case.model]
    assert manifest_problems(manifest(case.spec, source)) == [] or case.place is not None
    read = sglang.lines[case.name, role]["values"]
    expected = sglang.defaults | BOTH | {"model_path": source, "disaggregation_mode": role.value}
    expected |= {"disaggregation_transfer_backend": "pdcluster"}
    expected |= case.prefill if role is Role.PREFILL else case.decode
    assert {k: v for k, v in read.items() if v != expected[k]} == {}, "read otherwise than expected"


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("case", [c for c in CASES if c.fits], ids=lambda case: case.name)
def test_sglang_starts_with_what_the_operator_takes(sglang: Answers, case: Case, role: Role) -> None:
    assert sglang.lines[case.name, role].get("error") is None


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_is_refused_at_apply_is_what_sglang_refuses(sglang: Answers, case: Case) -> None:
    assert manifest_problems(manifest(case.spec, sglang.models[case.model])), "accepted at apply"
    assert any("error" in sglang.lines[case.name, role] for role in Role), "SGLang starts with it"


def test_the_names_of_owned_flags_are_those_of_the_two_engines(sglang: Answers) -> None:
    real = {name for names in sglang.flags.values() for name in names}
    own = {name for action in reference_options._parser()._actions for name in action.option_strings}
    named = {name for flag in OWNED for name in flag.names}
    assert sorted(named - real - own) == [], "neither engine has a flag of this name"
    dest_of = {name: dest for dest, names in sglang.flags.items() for name in names}
    for name in named & real:
        assert set(sglang.flags[dest_of[name]]) <= named, f"another name of {name} is not owned"


def test_no_spelling_that_argparse_takes_for_an_owned_flag_passes(sglang: Answers) -> None:
    dest_of = {name: dest for dest, names in sglang.flags.items() for name in names}
    owned = {dest_of[name] for flag in OWNED for name in flag.names if name in dest_of}
    taken = 0
    for spelling, dests in sglang.meant.items():
        if not set(dests) & owned:
            continue
        taken += 1
        underscores = "--" + spelling[2:].replace("-", "_")
        for argument in (spelling, f"{spelling}=1", underscores, f"{underscores}=1"):
            assert owned_flag(argument) is not None, f"{argument} sets {dests} and passes"
    assert taken > 200


def test_no_other_flag_of_sglang_is_taken_for_an_owned_one(sglang: Answers) -> None:
    named = {name for flag in OWNED for name in flag.names}
    others = [name for names in sglang.flags.values() for name in names if name not in named]
    assert [name for name in others if owned_flag(name) is not None] == []
    assert len(others) > 500


def test_the_fit_check_takes_these_lines_as_sglang_does(sglang: Answers) -> None:
    """What preflight lets through on one node has no flag that SGLang's parser refuses, and the other way round."""
    for case in CASES:
        spec = spec_of(case.spec, sglang.models[case.model])
        rules = {f.rule for f in preflight(spec).of("Fail")}
        assert not rules & {"EngineFlag", "SetTwice", "OwnedFlag", "TransferSetting", "Facts"}, case.name
