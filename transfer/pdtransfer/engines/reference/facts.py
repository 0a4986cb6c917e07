"""What the running engine says about itself: SGLang's /server_info and /model_info, read back from ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pdtransfer.engines.reference.messages import RankFacts
from pdtransfer.engines.reference.model_config import LlamaConfig
from pdtransfer.engines.reference.options import Options


def engine_version() -> str:
    """Version of the distribution this engine is part of."""
    try:
        return version("pdcluster")
    except PackageNotFoundError:
        return "unknown"


def server_info(
    options: Options, config: LlamaConfig, ranks: Sequence[RankFacts], load: dict[str, int]
) -> dict[str, Any]:
    """Body of /server_info. Sizes that a rank can tell come from the ranks, not from flags."""
    first = ranks[0]
    tokens = min(r.pages * r.page_tokens for r in ranks)
    return {
        "engine": "Reference",
        "version": engine_version(),
        "model_path": str(options.model_path),
        "tokenizer_path": str(options.model_path),
        "served_model_name": options.served_model_name,
        "model_type": config.model_type,
        "architectures": list(config.architectures),
        "host": options.host,
        "port": options.port,
        "tp_size": len(ranks),
        "dp_size": 1,
        "pp_size": 1,
        "page_size": first.page_tokens,
        "dtype": first.dtype,
        "kv_cache_dtype": first.kv_dtype,
        "context_length": config.max_position,
        "max_total_num_tokens": tokens,
        "max_total_tokens": tokens,
        "max_req_input_len": config.max_position - 1,
        "max_running_requests": options.max_running_requests,
        "chunked_prefill_size": options.chunked_prefill_size,
        "disaggregation_mode": options.mode,
        "disaggregation_transfer_backend": options.backend if options.disaggregated else None,
        "disaggregation_transfer_backend_emulated": options.backend != "pdcluster",
        "disaggregation_bootstrap_port": options.bootstrap_port if options.mode == "prefill" else None,
        "kv_memory_kinds": sorted({kind for r in ranks for kind in r.memory_kinds}),
        "emulated_vram": any(r.emulated_vram for r in ranks),
        "incarnation": options.incarnation,
        "pod_uid": options.pod_uid,
        "random_seed": options.seed,
        "ranks": [asdict(r) for r in ranks],
        "internal_states": [load],
        "status": "ready",
    }


def model_info(options: Options, config: LlamaConfig) -> dict[str, Any]:
    """Body of /model_info."""
    return {
        "model_path": str(options.model_path),
        "tokenizer_path": str(options.model_path),
        "served_model_name": options.served_model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": options.model_revision or "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": list(config.architectures),
        "vocab_size": config.vocab,
        "max_context_length": config.max_position,
        "eos_token_ids": list(config.eos_ids),
        "bos_token_id": config.bos_id,
    }
