"""SGLang's flags read without SGLang: argparse's rules, mistakes by name, and the facts that flags state.

Expected values are written by hand; tests/sglang holds the same code to SGLang's own parser."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.contract.base import Backend, MemoryKind, Role
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.sglang_cli import command_facts, given_facts, hidden_fact, read_flags
from pdtransfer.contract.sglang_cli.flags import FLAGS, OTHERS
from pdtransfer.contract.sglang_cli.kinds import tokens


@pytest.mark.parametrize(
    "line, values",
    [
        ("--tp-size 4", {"tp_size": 4}),
        ("--tensor-parallel-size=4", {"tp_size": 4}),
        ("--tp 4", {"tp_size": 4}),  # the beginning of one flag only
        ("--tp 4 --tp-size 2", {"tp_size": 2}),  # the last wins, whatever its spelling
        ("--enable-hicache", {"enable_hierarchical_cache": True}),
        ("--chunked-prefill-size -1", {"chunked_prefill_size": -1}),  # a negative number is a value
        ("--max-total-tokens 32k", {"max_total_tokens": 32000}),
        ("--context-length 128Ki", {"context_length": 131072}),
        ("--gc-threshold 1 2 3 --tp 2", {"gc_threshold": [1, 2, 3], "tp_size": 2}),
        ("--no-enable-tf32-matmul", {"enable_tf32_matmul": False}),
        ("--disaggregation-decode-host-receive-threshold 0", {"disaggregation_decode_host_receive_threshold": 0.0}),
    ],
)
def test_flags_are_read_as_argparse_reads_them(line: str, values: dict[str, Any]) -> None:
    flags = read_flags(line.split())
    assert dict(flags.values) == values
    assert flags.problems == ()


@pytest.mark.parametrize(
    "line, problem",
    [
        ("--tp-size", "--tp-size/--tensor-parallel-size: expected one argument"),
        ("--tp-size x", "--tp-size/--tensor-parallel-size: invalid int value: 'x'"),
        ("--kv-cache-dtype fp16", "--kv-cache-dtype: invalid choice: 'fp16'"),
        ("--enable-hicache=1", "--enable-hierarchical-cache/--enable-hicache: ignored explicit argument '1'"),
        ("--disaggregation-b 1 --disaggregation-decode x", "ambiguous option: --disaggregation-decode could match"),
        ("--tp 2 4", "'4' belongs to no flag"),
        ("--tp_size 2", "--tp_size: SGLang 0.5.23 has no such flag (it is spelled --tp-size)"),
        ("--tensor-paralel-size 2", "--tensor-paralel-size: SGLang 0.5.23 has no such flag"),
        ("--max-total-tokens 1.5Ki", "only whole numbers go with Ki"),
        ("-- --tp 2", "'--' belongs to no flag"),
    ],
)
def test_a_mistake_is_named_and_hides_nothing_else(line: str, problem: str) -> None:
    flags = read_flags([*line.split(), "--page-size", "16"] if not line.startswith("-- ") else line.split())
    assert any(problem in p for p in flags.problems), flags.problems
    assert line.startswith("-- ") or flags.get("page_size") == 16


def test_flags_that_sglang_does_not_have_are_told_apart_from_mistakes() -> None:
    flags = read_flags(["--new-feature", "3", "--tp", "two", "--new-feature=4"])
    assert flags.unknown == ("--new-feature",)
    assert len(flags.problems) == 2


def test_a_value_that_only_a_plugin_can_bring_is_told_apart() -> None:
    flags = read_flags(["--attention-backend", "mine", "--disaggregation-transfer-backend", "pdcluster"])
    assert flags.foreign == ("--attention-backend mine",) and flags.problems == ()
    assert read_flags(["--dsa-decode-backend", "mine"]).problems  # no plugin adds to these


@pytest.mark.parametrize("text, count", [("1k", 1000), ("25.6k", 25600), ("1Ki", 1024), ("2M", 2_000_000), ("7", 7)])
def test_sizes_of_token_counts(text: str, count: int) -> None:
    assert tokens(text) == count


@given(st.lists(st.text(max_size=12), max_size=8))
def test_no_arguments_make_it_raise(arguments: list[str]) -> None:
    read_flags(arguments)


def test_every_fact_in_the_table_is_one_of_a_role() -> None:
    assert {f.fact for f in FLAGS if f.fact} <= set(RoleFacts.model_fields)
    dests = [f.dest for f in (*FLAGS, *OTHERS) if f.dest != "enable_amd_monokernel"]  # one of SGLang's has two
    assert len(dests) == len(set(dests))


def facts(line: str, role: Role = Role.DECODE, **environment: str) -> RoleFacts:
    return command_facts(role, read_flags(line.split()), environment).facts


def test_what_a_command_line_leaves_out_has_sglangs_default() -> None:
    told = facts("--model-path m")
    assert (told.tensor_parallel, told.kv_dtype, told.model_dtype) == (1, "auto", "auto")
    assert told.backend is Backend.MOONCAKE  # SGLang's own default
    assert (told.host, told.bootstrap_port, told.nixl_backend) == ("127.0.0.1", 8998, "UCX")
    assert told.page_size is None and told.whole_command


def test_a_gpu_that_only_a_shell_knows_hides_nothing_else() -> None:
    """`--base-gpu-id $FIRST`: which GPU a rank has is not known then, and all the rest is."""
    flags = read_flags(["--base-gpu-id", "$FIRST", "--nnodes", "2"], ["$FIRST"])
    told = command_facts(Role.DECODE, flags, {}).facts
    assert (told.base_gpu_id, told.nodes, told.gpu_id_step, told.use_ray) == (None, 2, 1, False)
    assert told.whole_command and told.host == "127.0.0.1"
    assert facts("--base-gpu-id 4 --gpu-id-step 2").base_gpu_id == 4


@pytest.mark.parametrize(
    "line, mode, kinds",
    [
        ("", HostKVMode.OFF, frozenset({MemoryKind.VRAM})),
        ("--disaggregation-decode-host-receive-threshold 1", HostKVMode.OFF, frozenset({MemoryKind.VRAM})),
        ("--disaggregation-decode-host-receive-threshold 0.5", HostKVMode.HOST_RECEIVE, None),
        ("--enable-hisparse", HostKVMode.HISPARSE, None),
    ],
)
def test_where_decode_receives(line: str, mode: HostKVMode, kinds: frozenset[MemoryKind] | None) -> None:
    told = facts(line)
    assert told.host_kv is mode and told.memory_kinds == kinds


def test_dsa_kernels_are_those_of_the_role() -> None:
    line = "--dsa-prefill-backend trtllm --dsa-decode-backend flashmla_kv"
    assert facts(line, Role.PREFILL).dsa_backend == "trtllm"
    assert facts(line, Role.DECODE).dsa_backend == "flashmla_kv"


def test_mooncake_over_tcp_is_mooncake() -> None:
    told = facts("--disaggregation-transfer-backend mooncake_tcp")
    assert told.backend is Backend.MOONCAKE and told.mooncake_tcp is True


def test_the_environment_tells_facts_and_a_value_without_effect_is_named() -> None:
    environment = {
        "SGLANG_DISAGG_STAGING_BUFFER": "Yes",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND": "LIBFABRIC",
        "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "on",
        "HOST_IP": "10.0.0.1",
    }
    read = command_facts(Role.PREFILL, read_flags([]), environment)
    assert read.facts.staging_buffer is True and read.facts.nixl_backend == "LIBFABRIC"
    assert read.facts.rank_host == "10.0.0.1"
    assert read.facts.sampling_mask is False  # `on` is no boolean to SGLang: its default holds
    assert [p for p in read.problems if "SGLANG_ENABLE_DISAGG_SAMPLING_MASK=on has no effect" in p]


def test_a_flag_goes_before_its_variable() -> None:
    assert facts("--mamba-ssm-dtype float32", SGLANG_MAMBA_SSM_DTYPE="bfloat16").ssm_dtype == "float32"
    assert facts("", SGLANG_MAMBA_SSM_DTYPE="bfloat16").ssm_dtype == "bfloat16"


def test_impossible_sizes_and_unknown_backends_are_named() -> None:
    read = command_facts(
        Role.PREFILL, read_flags(["--tp", "0", "--disaggregation-transfer-backend", "mori", "--page-size", "16"]), {}
    )
    assert any("tensor parallel can not be 0" in p for p in read.impossible)
    assert any("'mori'" in p for p in read.problems)
    assert read.facts.page_size == 16


def test_a_value_that_nobody_knows_leaves_its_fact_open() -> None:
    read = command_facts(Role.DECODE, read_flags([]), {}, unknown=("host", "SGLANG_DISAGG_STAGING_BUFFER"))
    assert read.facts.host is None and read.facts.staging_buffer is None
    assert hidden_fact(Role.DECODE, "tp_size") == ""  # without it nothing could be said


def test_given_facts_hold_only_what_was_given() -> None:
    flags = read_flags(["--tp", "2", "--kv-cache-dtype", "fp8_e4m3"])
    assert given_facts(Role.PREFILL, flags) == {"tensor_parallel": 2, "kv_dtype": "fp8_e4m3"}
