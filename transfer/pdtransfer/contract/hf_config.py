"""Reads a model's KV shape from a Hugging Face config.json.

Field names differ between model families; what is looked at and in which order stands in the
tables below. Nothing is guessed: a missing or unusable field is a GeometryError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdtransfer.contract.geometry import AttentionKind, GeometryError, ModelGeometry

LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_FIELDS = ("num_attention_heads", "n_head", "num_heads")
KV_HEAD_FIELDS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num")
HIDDEN_FIELDS = ("hidden_size", "n_embd", "d_model")
MAX_LAYERS = 4096
SLIDING = frozenset({"sliding_attention", "chunked_attention"})
FULL = frozenset({"full_attention", "attention", "global_attention"})
LINEAR = frozenset({"linear_attention", "mamba", "conv", "recurrent"})
EVERY_SECOND_SLIDES = frozenset({"gemma2"})
DEEPSEEK_V4_TYPES = frozenset({"deepseek_v4", "deepseek_v41", "deepseek_v41_text"})
SINK_FIELDS = ("learnable_sink", "add_swa_attention_sink_bias", "add_full_attention_sink_bias")
SSM_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def read_geometry(config: Mapping[str, Any]) -> ModelGeometry:
    """Geometry of the language model in `config` (multimodal configs nest it in text_config).

    Raises GeometryError naming the field that is missing, of a wrong type or inconsistent."""
    if not isinstance(config, Mapping):
        raise GeometryError("config", f"a JSON object is needed, not {type(config).__name__}")
    text = _text_config(config)
    layers = _need(text, LAYER_FIELDS)
    if layers > MAX_LAYERS:
        raise GeometryError(LAYER_FIELDS[0], f"{layers} layers are more than {MAX_LAYERS}")
    dtype = _dtype(text) or _dtype(config)
    model_type = _string(text, "model_type") or _string(config, "model_type")
    sliding, linear, kvless = _layer_patterns(text, layers, model_type)
    common: dict[str, Any] = {
        "layers": layers,
        "sliding_window_layers": sliding,
        "linear_layers": linear,
        "kvless_layers": kvless,
        "sliding_window": _optional(text, ("sliding_window", "sliding_window_size")) if sliding else None,
        "dtype": dtype,
        "model_type": model_type,
        "max_context": _optional(text, ("max_position_embeddings", "n_positions", "seq_length")),
        "architecture": _architecture(config),
        **_peculiar(text, layers, linear),
    }
    if _string(config, "model_type") in DEEPSEEK_V4_TYPES or model_type in DEEPSEEK_V4_TYPES:
        return _deepseek_v4(text, common)
    rank = _optional(text, ("kv_lora_rank",))
    if rank:
        rope = _need(text, ("qk_rope_head_dim",))
        index = _optional(text, ("index_head_dim",))
        return ModelGeometry(
            attention=AttentionKind.DSA if index else AttentionKind.MLA,
            kv_heads=1,
            head_dim=rank + rope,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            index_head_dim=index,
            index_pool=_optional(text, ("index_kpool",)) or 1,
            **common,
        )
    return ModelGeometry(attention=AttentionKind.GQA, **_gqa(text), **common)


def _deepseek_v4(text: Mapping[str, Any], common: Mapping[str, Any]) -> ModelGeometry:
    """DeepSeek-V4 and V4.1: one row of `head_dim` elements for all heads (its rope part is within), with an
    index. What a page really holds depends on each layer's compression; cards tell it."""
    return ModelGeometry(
        attention=AttentionKind.DSA,
        kv_heads=1,
        head_dim=_optional(text, ("head_dim", "v_head_dim")) or 512,
        index_head_dim=_optional(text, ("index_head_dim",)),
        **common,
    )


def _peculiar(text: Mapping[str, Any], layers: int, linear: tuple[int, ...]) -> dict[str, Any]:
    """What some families have beside their KV. Names and defaults are those of SGLang 0.5.23's own readers."""
    found: dict[str, Any] = {"compressed_index_heads": _optional(text, ("indexer_n_heads",))}
    if linear:
        stated = _string(text, "mamba_ssm_dtype")
        found["ssm_dtype"] = stated if stated in SSM_DTYPES else "float32"
    sinks = [text.get(name) for name in SINK_FIELDS]
    # HY-V4 has them unless its config says otherwise.
    found["attention_sinks"] = any(sinks) or (_string(text, "model_type") == "hy_v4" and sinks[0] is None)
    if text.get("is_hybrid_swa") is True:
        found["hybrid_swa"] = True
    if text.get("prefix_lm") is False:
        found["prefix_lm"] = False
    # MiniCPM repeats `mixer_types` over its layers; without the field none of them is a lightning layer.
    mixers = text.get("mixer_types")
    names = [str(m) for m in mixers] if isinstance(mixers, list) and mixers else ["minicpm4"]
    found["minicpm_lightning"] = any(name.startswith("lightning") for name in names[:layers])
    if isinstance(text.get("sparse_config"), Mapping):
        found["minicpm_sparse"] = any(not name.startswith("lightning") for name in names[:layers])
    sparse = text.get("sparse_attention_config")
    if isinstance(sparse, Mapping):
        # MiniMax-M3: a layer of frequency 0 is dense; a sparse one has an index value unless it is switched off.
        often, keys_only = sparse.get("sparse_attention_freq"), sparse.get("sparse_disable_index_value")
        off = keys_only if isinstance(keys_only, list) else []
        if isinstance(often, list):
            found["index_values"] = any(f and not (i < len(off) and off[i]) for i, f in enumerate(often))
    return found


def _gqa(text: Mapping[str, Any]) -> dict[str, Any]:
    """Heads and dims of grouped-query attention; full layers first, sliding ones where they differ."""
    heads = _need(text, HEAD_FIELDS)
    kv_heads = _optional(text, KV_HEAD_FIELDS)
    if kv_heads is None:
        kv_heads = 1 if text.get("multi_query") is True else heads
    head_dim = _optional(text, ("head_dim", "attention_head_dim", "kv_channels"))
    if head_dim is None:
        hidden = _need(text, HIDDEN_FIELDS)
        if hidden % heads:
            raise GeometryError("head_dim", f"not given, and hidden size {hidden} / {heads} heads is not whole")
        head_dim = hidden // heads
    v_head_dim = _optional(text, ("v_head_dim",))
    shape: dict[str, Any] = {
        "swa_kv_heads": _optional(text, ("swa_num_key_value_heads",)),
        "swa_head_dim": _optional(text, ("swa_head_dim",)),
        "swa_v_head_dim": _optional(text, ("swa_v_head_dim",)),
    }
    # Gemma 4 states the sliding layers' dims in the usual fields and the full layers' in global_*.
    global_dim = _optional(text, ("global_head_dim",))
    if global_dim is not None:
        shape["swa_head_dim"], head_dim = head_dim, global_dim
    global_heads = _optional(text, ("num_global_key_value_heads",))
    if global_heads is not None:
        shape["swa_kv_heads"], kv_heads = kv_heads, global_heads
    if heads % kv_heads:
        raise GeometryError("num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads")
    return {"kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, **shape}


Pattern = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _layer_patterns(text: Mapping[str, Any], layers: int, model_type: str | None) -> Pattern:
    """(sliding, linear, without KV) layer ids. A window on every layer is no pattern: engines
    then keep one ordinary pool, and every layer pages its KV."""
    kinds = _layer_kinds(text, layers, model_type)
    shared = _optional(text, ("num_kv_shared_layers",)) or 0
    if shared >= layers:
        raise GeometryError("num_kv_shared_layers", f"{shared} of {layers} layers")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "S" and i < layers - shared)
    if len(sliding) == layers:
        sliding = ()
    linear = tuple(i for i, kind in enumerate(kinds) if kind == "L")
    kvless = tuple(i for i, kind in enumerate(kinds) if kind == "-" or i >= layers - shared)
    return sliding, linear, kvless


def _layer_kinds(text: Mapping[str, Any], layers: int, model_type: str | None) -> str:
    """One letter per layer: F full, S sliding, L linear, - none."""
    types = text.get("layer_types")
    if types is not None:
        return "".join(_letter(t, i) for i, t in enumerate(_list(types, "layer_types", layers)))
    pattern = text.get("hybrid_layer_pattern")
    if pattern is not None:
        # MiMo-V2: 1 marks a sliding layer.
        return "".join("S" if v else "F" for v in _list(pattern, "hybrid_layer_pattern", layers))
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str):
        # Nemotron-H: M Mamba, * attention, - MLP, E experts.
        table = {"M": "L", "*": "F", "-": "-", "E": "-"}
        kinds = "".join(table.get(c, "?") for c in letters)
        if len(kinds) != layers or "?" in kinds:
            raise GeometryError("hybrid_override_pattern", f"{letters!r} does not name {layers} layers")
        return kinds
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("kda_layers") is not None:
        # Kimi-Linear counts layers from 1.
        kda = linear["kda_layers"]
        if not isinstance(kda, list) or not all(isinstance(i, int) and 1 <= i <= layers for i in kda):
            raise GeometryError("linear_attn_config.kda_layers", f"layer numbers 1..{layers} are needed")
        return "".join("L" if i + 1 in set(kda) else "F" for i in range(layers))
    interval = _optional(text, ("full_attention_interval",))
    if interval:
        return "".join("F" if (i + 1) % interval == 0 else "L" for i in range(layers))
    every = _optional(text, ("sliding_window_pattern", "_sliding_window_pattern"))
    if every and text.get("sliding_window"):
        return "".join("F" if (i + 1) % every == 0 else "S" for i in range(layers))
    if model_type in EVERY_SECOND_SLIDES and text.get("sliding_window"):
        return "".join("F" if i % 2 else "S" for i in range(layers))
    return "F" * layers


def _letter(kind: Any, index: int) -> str:
    for names, letter in ((FULL, "F"), (SLIDING, "S"), (LINEAR, "L")):
        if isinstance(kind, str) and kind in names:
            return letter
    raise GeometryError("layer_types", f"layer {index} is {kind!r}, a kind this version does not know")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal config that describes the language model."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping) and nested:
            return _text_config(nested)
    return config


def _need(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _optional(config, names)
    if value is None:
        also = f" (also looked for {', '.join(names[1:])})" if names[1:] else ""
        raise GeometryError(names[0], f"missing in the model's config{also}")
    return value


def _optional(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """First of `names` that is there and not null, as a positive int; 0 counts as absent only
    where a family writes 0 for 'none' (num_kv_shared_layers, sliding windows)."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GeometryError(name, f"a positive whole number is needed, not {value!r}")
        if value == 0:
            if name in ("num_kv_shared_layers", "sliding_window", "sliding_window_size", "kv_lora_rank"):
                continue
            raise GeometryError(name, "must not be 0")
        return value
    return None


def _list(value: Any, name: str, layers: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != layers:
        size = len(value) if isinstance(value, list) else type(value).__name__
        raise GeometryError(name, f"one entry per layer is needed: {layers}, not {size}")
    return value


def _string(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    return value if isinstance(value, str) else None


def _architecture(config: Mapping[str, Any]) -> str | None:
    """Of the whole model: SGLang looks at the outer config."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _dtype(config: Mapping[str, Any]) -> str | None:
    """transformers writes `dtype` since v5 and `torch_dtype` before."""
    found = _string(config, "dtype") or _string(config, "torch_dtype")
    return found.removeprefix("torch.") if found else None
