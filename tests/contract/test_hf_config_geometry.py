"""Geometry read from config.json: against configs as published (in small) and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.geometry import AttentionKind, GeometryError, from_hf_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def test_llama() -> None:
    g = from_hf_config(LLAMA)
    assert (g.attention, g.layers, g.kv_heads, g.head_dim, g.dtype, g.max_context, g.model_type) == (
        AttentionKind.GQA,
        32,
        8,
        128,
        "bfloat16",
        131072,
        "llama",
    )
    assert g.kv_layers == tuple(range(32))


def test_mha_without_kv_heads_and_an_explicit_head_dim() -> None:
    g = from_hf_config({"n_layer": 12, "n_head": 12, "n_embd": 768, "head_dim": 80})
    assert (g.kv_heads, g.head_dim) == (12, 80)


def test_a_window_on_every_layer_is_no_pattern() -> None:
    assert from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": 4096}).sliding_window_layers == ()
    every = LLAMA | {"layer_types": ["sliding_attention"] * 32}
    assert from_hf_config(every).sliding_window_layers == ()


def test_deepseek_v3_is_mla_and_v32_dsa() -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    g = from_hf_config(config)
    assert (g.attention, g.kv_lora_rank, g.qk_rope_head_dim, g.head_dim, g.kv_heads) == (
        AttentionKind.MLA,
        512,
        64,
        576,
        1,
    )
    dsa = from_hf_config(config | {"index_head_dim": 128})
    assert (dsa.attention, dsa.index_head_dim) == (AttentionKind.DSA, 128)


def test_mimo_v2_has_other_v_dims_and_other_heads_on_sliding_layers() -> None:
    g = from_hf_config(
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "sliding_window": 128,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        }
    )
    assert (g.kv_heads, g.head_dim, g.value_dim, g.swa_kv_heads) == (4, 192, 128, 8)
    assert (g.sliding_window_layers, g.sliding_window) == ((1, 2, 3, 4), 128)


def test_hybrid_linear_models() -> None:
    base = LLAMA | {"num_hidden_layers": 8}
    listed = from_hf_config(base | {"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["mamba"] * 4})
    assert (listed.linear_layers, listed.kv_layers) == ((0, 1, 2, 4, 5, 6, 7), (3,))
    assert from_hf_config(base | {"full_attention_interval": 4}).kv_layers == (3, 7)
    # Kimi-Linear counts its layers from 1.
    kimi = from_hf_config(base | {"linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7]}})
    assert kimi.kv_layers == (3, 7)
    nemotron = from_hf_config(base | {"hybrid_override_pattern": "M-M*-MEM"})
    assert (nemotron.linear_layers, nemotron.kvless_layers, nemotron.kv_layers) == ((0, 2, 5, 7), (1, 4, 6), (3,))


def test_layers_that_reuse_others_kv_own_none() -> None:
    types = ["sliding_attention", "full_attention"] * 4
    g = from_hf_config(LLAMA | {"num_hidden_layers": 8, "layer_types": types, "num_kv_shared_layers": 3})
    assert (g.kvless_layers, g.sliding_window_layers, g.kv_layers) == ((5, 6, 7), (0, 2, 4), (1, 3))


def test_multimodal_configs_nest_the_language_model() -> None:
    g = from_hf_config({"model_type": "mm", "dtype": "float16", "text_config": LLAMA | {"torch_dtype": None}})
    assert (g.layers, g.dtype, g.model_type) == (32, "float16", "llama")
    assert from_hf_config({"thinker_config": {"text_config": LLAMA}}).layers == 32


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 4}, "num_attention_heads"),
        ({"num_hidden_layers": 4, "num_attention_heads": 8}, "hidden_size"),
        (LLAMA | {"hidden_size": 4095}, "head_dim"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA | {"num_key_value_heads": [8] * 32}, "num_key_value_heads"),
        (LLAMA | {"layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA | {"layer_types": ["warp_attention"] * 32}, "layer_types"),
        (LLAMA | {"layer_types": [["full_attention"]] * 32}, "layer_types"),
        (LLAMA | {"kv_lora_rank": 512}, "qk_rope_head_dim"),
        (LLAMA | {"num_kv_shared_layers": 32}, "num_kv_shared_layers"),
        (LLAMA | {"hybrid_override_pattern": "MM"}, "hybrid_override_pattern"),
        (LLAMA | {"linear_attn_config": {"kda_layers": [0]}}, "linear_attn_config.kda_layers"),
    ],
)
def test_errors_name_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(GeometryError) as caught:
        from_hf_config(config)
    assert caught.value.field == field


NAMES = sorted(
    {*LLAMA, "layer_types", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "head_dim", "v_head_dim"}
    | {"hybrid_layer_pattern", "hybrid_override_pattern", "full_attention_interval", "sliding_window_pattern"}
    | {"sliding_window", "num_kv_shared_layers", "global_head_dim", "linear_attn_config", "text_config", "multi_query"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "x", "M*-", "gemma2"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "kda_layers"]), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=10), st.booleans())
def test_any_config_is_a_geometry_or_a_named_error(changes: dict[str, Any], complete: bool) -> None:
    try:
        g = from_hf_config((LLAMA if complete else {}) | changes)
    except GeometryError as error:
        assert error.field
    else:
        assert g.layers > 0 and set(g.kv_layers) <= set(range(g.layers))


def test_a_config_that_is_no_object() -> None:
    with pytest.raises(GeometryError, match="JSON object"):
        from_hf_config([1])  # type: ignore[arg-type]


def test_published_families_as_transformers_lays_them_out() -> None:
    """transformers' own config classes fill in the layer patterns; ours must read them alike."""
    pytest.importorskip("transformers")
    from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    for config in (GptOssConfig(), Gemma3TextConfig(), Qwen3NextConfig()):
        g = from_hf_config(config.to_dict())
        assert (g.layers, g.kv_heads, g.head_dim) == (
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
        )
        assert g.kv_layers == tuple(i for i, t in enumerate(config.layer_types) if t == "full_attention")
        linear = tuple(i for i, t in enumerate(config.layer_types) if t == "linear_attention")
        assert g.linear_layers == linear
    # The same patterns where an older config.json states a rule instead of a list.
    text = {k: v for k, v in Gemma3TextConfig().to_dict().items() if k != "layer_types"}
    old = from_hf_config(text | {"sliding_window_pattern": 6})
    assert old.kv_layers == from_hf_config(Gemma3TextConfig().to_dict()).kv_layers
