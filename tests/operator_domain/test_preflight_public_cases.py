"""Pairs that people really ran, from public bug reports, as the command lines that they would have typed.

What each must say comes from those reports and the table of rules, not from this code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdoperator.cli import main

GQA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
FOUR_HEADS = GQA | {"num_key_value_heads": 4}
SLIDING = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
MLA = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
NIXL, OURS = "--disaggregation-transfer-backend nixl", "--disaggregation-transfer-backend pdcluster"
STAGING = "SGLANG_DISAGG_STAGING_BUFFER=1 "

FAILS: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    ("sliding windows at unequal TP", SLIDING, NIXL, "--tp 1", "--tp 4", "D2"),
    ("KV dtypes differ", GQA, NIXL, "--kv-cache-dtype bfloat16", "--kv-cache-dtype fp8_e4m3", "B3"),
    ("one KV dtype spelled two ways", GQA, NIXL, "", "--kv-cache-dtype bfloat16", "B3"),
    ("page sizes differ", GQA, NIXL, "--page-size 64", "--page-size 32", "B1"),
    ("an attention backend changes one page size", GQA, NIXL, "--attention-backend trtllm_mha", "--page-size 1", "B1"),
    (
        "speculation on prefill only",
        GQA,
        NIXL,
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path d",
        "",
        "C2",
    ),
    ("KV heads round to zero", FOUR_HEADS, NIXL, "--tp 8", "--tp 16", "A6"),
    ("TP not divisible", GQA, NIXL, "--tp 3", "--tp 2", "A3"),
    ("decode's cache without its radix", GQA, NIXL, "", "--enable-hierarchical-cache --hicache-ratio 2", "E2"),
    ("host buffers at unequal TP", GQA, NIXL, "--tp 2", "--tp 1 --enable-hisparse", "F3"),
]
FITS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("more ranks than KV heads", GQA, OURS, "--tp 8", "--tp 16"),
    ("heads that round to zero elsewhere", FOUR_HEADS, OURS, "--tp 8", "--tp 16"),
    ("speculation without KV", GQA, NIXL, "--speculative-algorithm NGRAM", ""),
    ("attention TP 4 on both sides, of different width", MLA, NIXL, "--tp 8 --attn-dp-size 2", "--tp 4"),
]


def preflight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], prefill: str, decode: str
) -> tuple[int, dict[str, str]]:
    """(exit code, rule -> status) of a pair; `prefill` and `decode` are what comes to the usual flags."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    lines = []
    for role, more in (("prefill", prefill), ("decode", decode)):
        env, more = (STAGING, more.removeprefix(STAGING)) if more.startswith(STAGING) else ("", more)
        lines.append(
            f"{env}python -m sglang.launch_server --model-path m --host 0.0.0.0 --disaggregation-mode {role} {more}"
        )
    options = ["--model-config", str(file), "--engine-version", "0.5.23", "--gpu", "SM90", "-o", "json"]
    code = main(["preflight", "--prefill-args", lines[0], "--decode-args", lines[1], *options])
    worst: dict[str, str] = {}
    for f in json.loads(capsys.readouterr().out)["findings"]:
        if f["status"] != "Pass":
            worst[f["rule"]] = f["status"] if worst.get(f["rule"]) != "Fail" else "Fail"
    return code, worst


@pytest.mark.parametrize(
    "what, config, backend, prefill, decode, rule", FAILS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_failed_in_public_fails_here_first(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    config: dict[str, Any],
    backend: str,
    prefill: str,
    decode: str,
    rule: str,
) -> None:
    code, found = preflight(tmp_path, capsys, config, f"{backend} {prefill}", f"{backend} {decode}")
    assert code == 1 and found.get(rule) == "Fail", found


@pytest.mark.parametrize("what, config, backend, prefill, decode", FITS, ids=[c[0] for c in FITS])
def test_what_works_is_let_through(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    config: dict[str, Any],
    backend: str,
    prefill: str,
    decode: str,
) -> None:
    code, found = preflight(tmp_path, capsys, config, f"{backend} {prefill}", f"{backend} {decode}")
    assert code == 0 and "Fail" not in found.values(), found


def test_staging_with_a_latent_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = preflight(tmp_path, capsys, MLA, STAGING + NIXL, NIXL)
    assert code == 1 and found.get("G1") == "Fail", found


def test_a_context_that_only_one_side_has_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = preflight(tmp_path, capsys, GQA, NIXL, NIXL + " --context-length 8192")
    assert code == 0 and found.get("B14") == "Warn", found
