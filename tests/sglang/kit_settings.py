"""Servers as the comparisons of settings with SGLang describe them: small models, machines, command lines.

`ask` gives SGLang's own answers (`kit_resolve.py` in its own Python), `as_facts` the same server as facts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kit_machine import TREE, cpu_variables, environment

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import from_hf_config
from pdtransfer.contract.sglang_cli import command_facts, read_flags

RESOLVE_S = 500


def config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
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
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_INDEX = {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": config("LlamaForCausalLM", "llama"),
    "qwen3": config("Qwen3ForCausalLM", "qwen3"),
    "deepseek_v3": config("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT),
    "deepseek_v32": config("DeepseekV32ForCausalLM", "deepseek_v32", **_LATENT, **_INDEX),
    "glm_dsa": config("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_LATENT, **_INDEX),
    "gpt_oss": config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_next": config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=4,
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
    "deepseek_v4": config(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        head_dim=512,
        num_key_value_heads=1,
        q_lora_rank=64,
        o_lora_rank=64,
        qk_rope_head_dim=64,
        compress_ratios=[0, 4],
        index_head_dim=128,
        index_n_heads=4,
        index_topk=64,
        sliding_window=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "mimo": config(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        head_dim=192,
        v_head_dim=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_num_key_value_heads=2,
        hybrid_layer_pattern=[0, 1],
        sliding_window_size=128,
    ),
    "minimax_m3": config("MiniMaxM3SparseForCausalLM", "minimax_m3_vl_text"),
    "nemotron_h": config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M*"),
    "llama4": config("Llama4ForCausalLM", "llama4_text", num_local_experts=2, num_experts_per_tok=1),
    "olmo2": config("Olmo2ForCausalLM", "olmo2"),
    "falcon_h1": config("FalconH1ForCausalLM", "falcon_h1"),
    "lfm2": config("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"]),
}


@dataclass(frozen=True)
class Case:
    """One server: `argv` after the model, with its role."""

    model: str
    accelerator: str
    role: Role
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """For messages."""
        variables = " ".join(f"{k}={v}" for k, v in self.environment.items())
        return f"{variables} {self.model} on {self.accelerator}, {self.role.value}: {' '.join(self.argv)}".strip()

    @property
    def command(self) -> list[str]:
        """All arguments but the model."""
        backend = (
            [] if "--disaggregation-transfer-backend" in self.argv else ["--disaggregation-transfer-backend", "nixl"]
        )
        return ["--disaggregation-mode", self.role.value, *backend, *self.argv]


def ask(cases: Sequence[Case], fields: Sequence[str], *, check: bool = False) -> dict[str, dict[str, Any]]:
    """SGLang's answer to every case by its id, from one process of its own Python. `check`: it also checks what it
    resolved, as its launcher does."""
    home = environment()
    if home is None:
        pytest.fail("SGLang's environment is not there: run make sglang-env")
    asked = [
        {
            "config": MODELS[c.model],
            "accelerator": c.accelerator,
            "argv": c.command,
            "environment": c.environment,
            "fields": list(fields),
            "check": check,
        }
        for c in cases
    ]
    done = subprocess.run(
        [str(home / "bin" / "python"), "-W", "ignore", str(Path(__file__).with_name("kit_resolve.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=RESOLVE_S,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **cpu_variables()},
        cwd=TREE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip((c.id for c in cases), json.loads(done.stdout), strict=True))


def as_facts(case: Case) -> RoleFacts:
    """The same server as facts, through our reader of command lines."""
    asked = command_facts(
        case.role,
        read_flags(case.command),
        case.environment,
        geometry=from_hf_config(MODELS[case.model]),
        accelerator=Accelerator(case.accelerator),
        engine_version="0.5.23",
    )
    assert not asked.problems, asked.problems
    return asked.facts
