"""The checkpoint that the tests serve: a tiny Llama in float32, made on the spot, the same each time."""

from __future__ import annotations

import json
from pathlib import Path

from pdtransfer.engines.reference.tiny_model import make_tiny_model

CONTEXT = 4096
"""Tokens."""
VOCABULARY = 512
"""Token ids; the first three are special."""


def make_model(folder: Path, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, hidden: int = 256) -> Path:
    """Write a checkpoint that SGLang and transformers load. Float32: sums of another order (another TP) differ by
    about 1e-5 and can not flip a greedy token whose margin `Truth.decided` has checked. KV bytes of a token:
    layers x 2 x kv_heads x (hidden / heads) x 4."""
    make_tiny_model(
        folder,
        layers=layers,
        hidden=hidden,
        intermediate=2 * hidden,
        heads=heads,
        kv_heads=kv_heads,
        context=CONTEXT,
        vocab=VOCABULARY,
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "model_max_length": CONTEXT,
            }
        ),
        encoding="utf-8",
    )
    return folder
