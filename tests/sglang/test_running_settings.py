"""What a rank says of its settings is what SGLang resolved them to. Runs with SGLang's own Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.runtime_context import get_context, publish
from sglang.srt.server_args import prepare_server_args

from pdtransfer.contract.base import EngineType, Role
from pdtransfer.contract.card import EngineFacts
from pdtransfer.contract.sglang_cli.server import card_facts
from pdtransfer.engines.sglang.identity import read_model
from pdtransfer.engines.sglang.running import running_settings

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """SGLang's settings of a decode server, resolved and published as in its scheduler."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = prepare_server_args(
        [
            "--model-path", str(tmp_path), "--device", "cpu", "--attention-backend", "torch_native",
            "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl", "--page-size", "16",
            "--hicache-io-backend", "direct", "--mem-fraction-static", "0.3",
        ]
    )  # fmt: skip
    args.resolve_once()
    publish(args, role="scheduler")
    yield args


def test_a_rank_tells_what_sglang_made_of_its_settings(server: Any) -> None:
    told = dict(running_settings(server))
    assert told["page_size"] == 16 and told["attention_backend"] == "torch_native"
    assert told["disable_radix_cache"] is True  # not asked for: decode without its own flag
    assert told["hicache_mem_layout"] == "page_first_direct"  # the default does not go with direct I/O
    facts = card_facts(Role.DECODE, running_settings(server))
    assert facts["hicache_mem_layout"] == "page_first_direct" and facts["disable_radix_cache"] is True


def test_the_model_of_a_ranks_card_brings_them_along(server: Any) -> None:
    model = read_model(server, latent=False)
    assert (model.layers, model.heads, model.dtype) == (2, 2, "bfloat16")
    assert dict(model.settings)["disaggregation_transfer_backend"] == "nixl"
    facts = EngineFacts(type=EngineType.SGLANG, version="0.5.23", settings=model.settings)
    assert EngineFacts.model_validate_json(facts.model_dump_json()) == facts


def test_what_is_settled_with_the_pools_is_told_as_it_was_settled(server: Any) -> None:
    get_context().override("test", disaggregation_decode_retraction_backup="cpu_tensor", hicache_ratio=0.25)
    told = dict(running_settings(server))
    assert (told["disaggregation_decode_retraction_backup"], told["hicache_ratio"]) == ("cpu_tensor", 0.25)


def test_a_server_that_does_not_tell_has_a_card_without_settings(caplog: pytest.LogCaptureFixture) -> None:
    assert running_settings(object()) == ()
    assert "does not tell its settings" in caplog.text
