"""What stops an SGLang server at its start: SGLang's own resolution of a command line, beside our rules' word START.

Each case is one server of a pair, on a machine described to SGLang; the other side has no flag of its own. The command
line goes through our own reader (contract.sglang_cli), so that flags, facts and rules are held to SGLang together.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kit_machine import TREE, cpu_variables, environment

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat import Status, check
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import from_hf_config
from pdtransfer.contract.sglang_cli import command_facts, read_flags

RESOLVE_S = 400
NAMES = {Backend.NIXL: "nixl", Backend.MOONCAKE: "mooncake", Backend.PDCLUSTER: "pdcluster"}
P, D = Role.PREFILL, Role.DECODE


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **more,
    }


_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _config("LlamaForCausalLM", "llama"),
    "mla": _config("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT),
    "dsa": _config(
        "DeepseekV32ForCausalLM", "deepseek_v32", index_head_dim=128, index_n_heads=4, index_topk=64, **_LATENT
    ),
    "linear": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        full_attention_interval=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "minicpm": _config("MiniCPMSALAForCausalLM", "minicpm_sala", sparse_config={"topk": 64}),
}


@dataclass(frozen=True)
class Server:
    """One server: its flags beside those of every server here, and its environment."""

    rule: str
    role: Role
    flags: str = ""
    model: str = "llama"
    backend: Backend = Backend.NIXL
    accelerator: str = "SM90"
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def argv(self) -> list[str]:
        """All arguments but the model."""
        mode = ["--disaggregation-mode", self.role.value, "--disaggregation-transfer-backend", NAMES[self.backend]]
        return [*mode, *self.flags.split()]


def both(rule: str, flags: str = "", **more: Any) -> list[Server]:
    return [Server(rule, role, flags, **more) for role in (P, D)]


def each(rule: str, role: Role, flags: str, **more: Any) -> list[Server]:
    return [Server(rule, role, flags, backend=b, **more) for b in NAMES]


SHARD = "--tp-size 4 --enable-kv-cache-sharding --attention-backend fa3 --page-size 64 --chunked-prefill-size 8192"
LATE = "--disaggregation-decode-allocation-policy prefill_complete"
RADIX = "--disaggregation-decode-enable-radix-cache"
SERVERS: list[Server] = [
    *(s for m in MODELS if m != "minicpm" for s in both("none", model=m)),
    *(s for b in NAMES for s in both("none", backend=b)),
    *both("A2", "--tp-size 6 --attn-dp-size 4"),
    *both("A2", "--tp-size 4 --attn-dp-size 2"),
    *both("A2", "--tp-size 4 --dp-size 2 --attn-dp-size 2"),
    *both("A2", "--tp-size 4 --dp-size 2 --enable-dp-attention"),
    *both("A11", "--pp-size 2 --speculative-algorithm NGRAM"),
    *both("A11", "--speculative-algorithm NGRAM"),
    *both("A11", "--pp-size 2"),
    *each("A14", D, "--tp-size 4 --dcp-size 2", model="mla"),
    *both("A16", "--tp-size 4 --dcp-size 2", model="dsa"),
    Server("A16", P, "--tp-size 4 --dcp-size 2", model="mla"),
    *each("A18", P, SHARD, model="mla"),
    Server("A18", D, SHARD, model="mla"),
    Server("A18", P, SHARD.replace("--tp-size 4", "--tp-size 1"), model="mla"),
    Server("A18", P, f"{SHARD} --attn-dp-size 2", model="mla"),
    Server("A18", P, SHARD.replace("64", "1"), model="mla"),
    Server("A18", P, SHARD.replace("8192", "-1"), model="mla"),
    Server("A18", P, SHARD.replace("8192", "1000"), model="mla"),
    Server("A18", P, f"{SHARD} --dcp-size 2", model="mla"),
    Server("A18", P, f"{SHARD} --enable-hierarchical-cache", model="mla"),
    Server("A18", P, f"{SHARD} --enable-hierarchical-cache --hicache-storage-backend file", model="mla"),
    Server("A18", P, f"{SHARD} --enable-lmcache", model="mla"),
    Server("A18", P, SHARD),
    Server("A18", P, SHARD, model="mla", variables=(("SGLANG_DISAGG_STAGING_BUFFER", "1"),)),
    *each("A19", P, "--enable-dsa-cache-layer-split", model="mla"),
    *each("A19", P, LATE),
    *each("A19", D, LATE),
    *(
        Server("A19", role, f"{LATE} {more}", backend=Backend.MOONCAKE)
        for role in (P, D)
        for more in (
            "--tp-size 2",
            "--tp-size 2 --dp-size 2 --enable-dp-attention",
            "--pp-size 2",
            "--enable-pd-role-switch",
            "--enable-hierarchical-cache",
            "--enable-hierarchical-cache --hicache-write-policy write_back",
        )
    ),
    Server("A19", D, f"{LATE} {RADIX}", backend=Backend.MOONCAKE),
    Server("A19", P, LATE, backend=Backend.MOONCAKE, variables=(("SGLANG_DISAGG_STAGING_BUFFER", "1"),)),
    *both("A19", "--enable-unified-memory"),
    *both("A20", "--enable-pd-role-switch"),
    *both("A20", "--enable-pd-role-switch --pp-size 2"),
    *both("A20", "--enable-pd-role-switch --tp-size 2 --ep-size 2", model="mla"),
    *both("A20", "--enable-pd-role-switch --speculative-algorithm NGRAM"),
    *both("A20", "--enable-pd-role-switch", backend=Backend.MOONCAKE),
    *both("B12", "--page-size 16 --chunked-prefill-size 1000"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1024"),
    *both("B12", "--page-size 16 --chunked-prefill-size -1"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1056 --tp-size 2 --attn-dp-size 2"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1064 --tp-size 2 --attn-dp-size 2"),
    Server("C7", D, f"{RADIX} --speculative-algorithm NGRAM"),
    Server("C7", D, RADIX),
    Server("C7", D, f"{RADIX} --speculative-algorithm EAGLE", model="mla"),
    Server("C7", D, f"{RADIX} --speculative-algorithm NEXTN", model="mla"),
    *both("D6", "--enable-linear-replayssm --disable-overlap-schedule", model="linear"),
    *both("D6", "--enable-linear-replayssm-spec", model="linear"),
    *(
        Server("D6", role, f"--disable-overlap-schedule --mamba-radix-cache-strategy {kept} {more}", model="linear")
        for role, more in ((P, ""), (P, "--disable-radix-cache"), (D, ""), (D, RADIX))
        for kept in (
            "no_buffer --page-size 1",
            "no_buffer --page-size 64",
            "extra_buffer --page-size 64",
            "extra_buffer_lazy --page-size 64",
            "auto --page-size 64",
        )
    ),
    *both("D7", "--enable-lmcache"),
    *both("D7", "--enable-watermark"),
    *both("D7", "--enable-response-store"),
    *both("D7", "--enable-pdmux --chunked-prefill-size -1 --disable-overlap-schedule"),
    *both("D7", model="minicpm"),
    *both("D7", "--attention-backend minicpm_flashattn", model="minicpm"),
    *both("D7", "--attention-backend fa3", model="minicpm"),
    *both("D7", model="minicpm", variables=(("SGLANG_MINICPM_FORCE_DENSE", "1"),)),
]


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """For each server why SGLang refuses it, '' where it does not."""
    home = environment()
    if home is None:
        pytest.skip("SGLang's environment is not there: run make sglang-env")
    here = Path(__file__).parent
    asked = [
        {
            "config": MODELS[s.model],
            "accelerator": s.accelerator,
            "argv": s.argv,
            "environment": dict(s.variables),
            "fields": ["page_size"],
        }
        for s in SERVERS
    ]
    done = subprocess.run(
        [str(home / "bin" / "python"), "-W", "ignore", str(here / "abcd_launch.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=RESOLVE_S,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **cpu_variables(), "PYTHONPATH": str(here)},
        cwd=TREE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [answer.get("error", "") for answer in json.loads(done.stdout)]


def facts(server: Server) -> RoleFacts:
    """The server as facts, by our own reader of command lines."""
    read = command_facts(
        server.role,
        read_flags(server.argv),
        dict(server.variables),
        geometry=from_hf_config(MODELS[server.model]),
        accelerator=Accelerator(server.accelerator),
    )
    return read.facts.model_copy(update={"engine_version": "0.5.23", "model_name": "m", "backend": server.backend})


def starts(server: Server) -> list[str]:
    """Rules that say SGLang refuses to start this server."""
    # Dense kernels, since the other side is of the same model and must not be what is refused.
    plain = Server("none", server.role.other, "--attention-backend fa3", backend=server.backend)
    sides = {server.role: facts(server), server.role.other: facts(plain)}
    geometry = sides[server.role].geometry
    sides = {role: f.model_copy(update={"geometry": geometry}) for role, f in sides.items()}
    report = check(sides[P], sides[D], server.backend)
    return [f.rule for f in report.of(Status.FAIL) if f.severity == "START"]


def test_what_sglang_refuses_to_start_the_rules_refuse(refusals: list[str]) -> None:
    wrong = []
    for server, theirs in zip(SERVERS, refusals, strict=True):
        ours = starts(server)
        if bool(ours) != bool(theirs):
            wrong.append((server, ours, theirs))
    assert wrong == []


def test_each_refusal_is_the_rule_it_was_made_for(refusals: list[str]) -> None:
    missed = [
        (server, starts(server))
        for server, theirs in zip(SERVERS, refusals, strict=True)
        if theirs and server.rule not in starts(server)
    ]
    assert missed == []
    assert {s.rule for s, why in zip(SERVERS, refusals, strict=True) if why} >= {
        "A2", "A11", "A14", "A16", "A18", "A19", "A20", "B12", "C7", "D6", "D7",
    }  # fmt: skip


def test_a_plain_server_of_every_model_starts(refusals: list[str]) -> None:
    assert [why for s, why in zip(SERVERS, refusals, strict=True) if s.rule == "none" and why] == []
