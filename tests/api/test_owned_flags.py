"""Operator-owned engine flags: refused in every spelling argparse takes, by the function and by the CRD's CEL."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdoperator.api.cel import RULES
from pdoperator.api.cel_flags import abbreviation_patterns, flag_pattern
from pdoperator.domain.engine_flags import OWNED, owned_flag, owned_flags
from pdtransfer.contract.sglang_cli import BY_DEST

LONG = sorted(name for flag in OWNED for name in flag.names)
# Flags of SGLang that users do pass; some begin like an owned one.
ALLOWED = [
    "--chunked-prefill-size", "--mem-fraction-static", "--trust-remote-code", "--context-length", "--dtype",
    "--enable-metrics", "--model-loader-extra-config", "--model-impl", "--dist-timeout", "--attention-backend",
    "--enable-mixed-chunk", "--enable-dp-lm-head", "--enable-hierarchical-cache", "--hicache-ratio",
    "--tokenizer-path", "--nccl-port", "--kv-events-config", "--disaggregation-decode-enable-radix-cache",
    "--disaggregation-decode-retraction-backup", "--preferred-sampling-params", "--page-major-layout",
    "--served-model-aliases", "--host-memory", "--ports", "--revisions", "--log-level", "--attn-cp-size",
]  # fmt: skip


def cel_refuses(arg: str) -> bool:
    """What the CRD's rules do, with Python's re for RE2 (the patterns use only what both have)."""
    patterns = [flag_pattern(flag) for flag in OWNED] + list(abbreviation_patterns())
    return any(re.search(pattern, arg) for pattern in patterns)


@pytest.mark.parametrize(
    ("arg", "name"),
    [
        ("--tensor-parallel-size", "--tp-size"),
        ("--tensor_parallel_size=8", "--tp-size"),
        ("--tens", "--tp-size"),
        ("--tp", "--tp-size"),
        ("--tp-s=2", "--tp-size"),
        ("--dp", "--dp-size"),
        ("--pp", "--pp-size"),
        ("--enable-hisp", "--kv-memory-kind"),
        ("--kv_digest", "--kv-strategy"),
        ("--page_siz", "--page-size"),
        ("--kv-cache-dtype=fp8_e5m2", "--kv-cache-dtype"),
        ("--disaggregation-mod", "--disaggregation-mode"),
        ("--dist-init-addr", "--dist-init-addr"),
        ("--ho", "--host"),
        ("--conf=x.yaml", "--config"),
    ],
)
def test_each_spelling_names_the_flag(arg: str, name: str) -> None:
    found = owned_flag(arg)
    assert found is not None and found.name == name
    assert cel_refuses(arg)


# No engine has a flag with one dash: argparse refuses -tp itself.
@pytest.mark.parametrize(
    "arg", [*ALLOWED, *(f"{flag}=1" for flag in ALLOWED), "8", "-1", "-0.5", "tp", "-tp", "-tp8", "--", "-", ""]
)
def test_other_arguments_pass(arg: str) -> None:
    assert owned_flag(arg) is None
    assert not cel_refuses(arg)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_spelling_that_argparse_takes_is_refused(data: st.DataObject) -> None:
    """argparse itself says which abbreviations of which flags it takes."""
    full = data.draw(st.sampled_from(LONG))
    arg = full[: data.draw(st.integers(3, len(full)))]
    parser = _Parser(add_help=False)
    sglang = {name for flag in BY_DEST.values() for name in flag.names if name.startswith("--")}
    for name in sorted({*LONG, *sglang, *ALLOWED}):
        parser.add_argument(name, nargs="?", dest=name)
    try:
        taken = {name for name, value in vars(parser.parse_args([f"{arg}=x"])).items() if value == "x"}
    except ValueError:
        taken = set()  # ambiguous: argparse refuses it
    spelling = "".join(data.draw(st.sampled_from(["-", "_"])) if c == "-" else c for c in arg[2:])
    spelling = f"--{spelling}{data.draw(st.sampled_from(['', '=x', '=']))}"
    if taken & set(LONG):
        assert owned_flag(spelling) is not None
        assert cel_refuses(spelling)


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"--?[a-z_-]{0,12}(=[a-z]*)?", fullmatch=True) | st.sampled_from(LONG).map(lambda f: f[:9]))
def test_cel_and_the_function_agree(arg: str) -> None:
    assert cel_refuses(arg) == (owned_flag(arg) is not None)


def test_the_message_says_which_field_to_use() -> None:
    uses = owned_flags(["--trust-remote-code", "--page_size=64"])
    assert [(use.index, use.message) for use in uses] == [
        (1, "'--page_size=64' sets --page-size, which the operator owns: use spec.kvCache.pageSize")
    ]


def test_no_rule_is_written_twice() -> None:
    assert len({(rule.path, rule.rule) for rule in RULES}) == len(RULES)


@pytest.mark.apiserver
def test_the_api_servers_regular_expressions_agree(crd_server: Any) -> None:
    """RE2 over full names, every third abbreviation and allowed flags, all in one object."""
    spellings = [name.replace("-", "_").replace("__", "--", 1) for name in LONG]
    spellings += [name[:length] for name in LONG for length in range(4, len(name), 9)]
    arguments = (spellings[:100] + ALLOWED)[:128]
    document = {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "flags", "namespace": "default"},
        "spec": {
            "model": {"source": "m"},
            "engine": {"image": "i"},
            "transfer": {"fabric": {"type": "TCP"}},
            "decode": {"extraArgs": arguments},
        },
    }
    result = crd_server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=document)
    refused = {int(index) for index in re.findall(r"spec\.decode\.extraArgs\[(\d+)\]", result.stderr)}
    assert refused == {index for index, arg in enumerate(arguments) if owned_flag(arg) is not None}
    assert len(refused) >= 90
