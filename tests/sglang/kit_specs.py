"""PDClusters of small models, their composed command lines, and what SGLang's own parser and resolution say to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit_configs import INDEX, LATENT, tiny_config
from kit_driver import ask_driver

from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.validation import with_defaults
from pdoperator.domain.engine_command import NodePlace, engine_command
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Role

ANSWER_S = 900
RDMA = {"type": "RDMA", "resources": [{"name": "rdma/hca"}]}
GQA = tiny_config(
    "LlamaForCausalLM", "llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=4
)
DSA = GQA | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"} | LATENT | INDEX
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
    """What command_lines_driver.py says to them, from one process of SGLang's own Python."""
    said: dict[str, Any] = ask_driver("command_lines_driver.py", {"lines": lines, "spellings": spellings}, ANSWER_S)
    return said
