"""PDClusters of small models, their composed command lines, and what SGLang's own parser and resolution say to them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit_machine import TREE, cpu_variables, environment

from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.validation import with_defaults
from pdoperator.domain.engine_command import NodePlace, engine_command
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Role

ANSWER_S = 900
RDMA = {"type": "RDMA", "resources": [{"name": "rdma/hca"}]}
GQA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
DSA = GQA | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
}
MODELS = {"gqa": GQA, "dsa": DSA}


def make_models(folder: Path) -> dict[str, str]:
    """A folder with the config.json of each model: name -> path."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {name: str(folder / name) for name in MODELS}


def manifest(changes: dict[str, Any], source: str) -> dict[str, Any]:
    """A PDCluster that serves the model in `source` with SGLang; `changes` by field of the spec."""
    spec: dict[str, Any] = {
        "model": {"source": source},
        "engine": {"type": "SGLang", "image": "sglang:0.5.23"},
        "transfer": {"fabric": {"type": "TCP"}},
    }
    for key, value in changes.items():
        spec[key] = spec.get(key, {}) | value
    return {"apiVersion": "pdcluster.io/v1alpha1", "kind": "PDCluster", "metadata": {"name": "c"}, "spec": spec}


def spec_of(changes: dict[str, Any], source: str) -> PDClusterSpec:
    """Its spec, as the API server would store it."""
    return PDClusterSpec.model_validate(with_defaults(manifest(changes, source))["spec"])


def arguments(changes: dict[str, Any], role: Role, source: str, place: NodePlace | None = None) -> list[str]:
    """The arguments that the operator composes for one side."""
    spec = spec_of(changes, source)
    return engine_command(spec, role, role_spec(spec, role), place)[1]


def ask_sglang(lines: list[dict[str, Any]], spellings: list[str]) -> dict[str, Any]:
    """What kit_command_lines says to them, from one process of SGLang's own Python."""
    home = environment()
    if home is None:
        pytest.fail("SGLang's environment is not there: run make sglang-env")
    done = subprocess.run(
        [str(home / "bin" / "python"), "-W", "ignore", str(Path(__file__).with_name("kit_command_lines.py"))],
        input=json.dumps({"lines": lines, "spellings": spellings}),
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **cpu_variables()},
        cwd=TREE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said
