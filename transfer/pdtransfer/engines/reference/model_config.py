"""What a Llama checkpoint's config.json says, checked, and how its heads split over TP ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdtransfer.contract.layout import HeadSlice
from pdtransfer.engines.reference.problems import SetupError

ARCHITECTURE = "LlamaForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling; `factor` alone (kind linear) divides every frequency."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the model. Sizes are counts; `dtype` is the checkpoint's own."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    model_type: str
    architectures: tuple[str, ...]

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Refuse a TP size that does not split query heads, MLP columns and KV heads evenly."""
        for what, size in (("attention heads", self.heads), ("MLP columns", self.intermediate)):
            if size % tp_size:
                raise SetupError(
                    f"--tp-size {tp_size} does not divide the model's {size} {what}; use a divisor of {size}"
                )
        if self.kv_heads % tp_size and tp_size % self.kv_heads:
            raise SetupError(f"--tp-size {tp_size} and the model's {self.kv_heads} KV heads do not divide one another")

    def kv_slice(self, rank: int, tp_size: int) -> HeadSlice:
        """KV heads of `rank`: an equal run each, or one head on several neighbouring ranks when there
        are more ranks than heads (section 7 of the rules: max(1, H // tp))."""
        count = max(1, self.kv_heads // tp_size)
        return HeadSlice(first=rank * self.kv_heads // tp_size, count=count, total=self.kv_heads)


def load_config(folder: Path) -> LlamaConfig:
    """Read and check `folder`/config.json."""
    if not folder.is_dir():
        raise SetupError(
            f"model folder {folder} is not there; --model-path takes a folder with config.json, "
            "model.safetensors and tokenizer.json (is the volume mounted?)"
        )
    raw = _read_json(folder / "config.json")
    architectures = tuple(raw.get("architectures") or ())
    if ARCHITECTURE not in architectures:
        raise SetupError(
            f"{folder / 'config.json'} names architectures {list(architectures)}; the Reference engine serves "
            f"{ARCHITECTURE} only (use engine.type SGLang for other models)"
        )
    try:
        return _parse(raw, folder)
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(f"{folder / 'config.json'}: field {error} is missing or not of the right type") from error


def _parse(raw: dict[str, Any], folder: Path) -> LlamaConfig:
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise SetupError(f"{folder / 'config.json'}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise SetupError(f"{folder / 'config.json'}: hidden_act {raw['hidden_act']!r} is not silu")
    if raw.get("quantization_config"):
        raise SetupError(f"{folder / 'config.json'}: quantized checkpoints are not supported; use a plain one")
    return LlamaConfig(
        vocab=int(raw["vocab_size"]),
        hidden=hidden,
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_position=int(raw.get("max_position_embeddings", 2048)),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, folder),
        tied=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=dtype,
        eos_ids=_eos_ids(raw, folder),
        bos_id=raw.get("bos_token_id"),
        model_type=str(raw.get("model_type", "llama")),
        architectures=tuple(raw["architectures"]),
    )


def _rope_scaling(rope: dict[str, Any], folder: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise SetupError(f"{folder / 'config.json'}: rope type {kind!r} is not default, linear or llama3")


def _eos_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(int(e) for e in eos) if isinstance(eos, list) else (int(eos),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SetupError(f"{path} is not there; the model folder must be a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} holds no JSON object")
    return value
