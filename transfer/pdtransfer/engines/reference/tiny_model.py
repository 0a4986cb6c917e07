"""Makes a tiny Llama checkpoint with random weights: small enough for a ConfigMap, varied in its words.

    python -m pdtransfer.engines.reference.tiny_model OUT --seed 0

Weights are scaled up against the usual initialisation, so that attention looks at different places, the
greedy tokens vary and the two best logits are mostly far apart (median gap about 0.7).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<s>", "</s>", "<pad>")
CORPUS = (
    "A prefill pod computes the keys and values of a prompt and a decode pod writes the answer.",
    "Pages of the cache travel from rank to rank while the next chunk is still being computed.",
    "Every peer has an incarnation; when it restarts, the roster names the new one and old writes are fenced.",
    "The operator reads the cards, checks the fit of both sides, and wires only those that do.",
    "Once upon a time there was a small model that knew nothing, said a lot, and was always the same.",
    "What is the capital of the country? How many tokens fit into a page? Where does the head begin?",
    "0 1 2 3 4 5 6 7 8 9 10 16 32 64 128 256 512 1024",
)


def build_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab` entries or fewer, trained on a few sentences: any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def build_weights(
    *, seed: int, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, torch.Tensor]:
    """Random float32 weights under the names of a Hugging Face Llama checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        weight: torch.Tensor = torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)
        return weight

    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator) * 0.5,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(vocab, hidden, 4.0),
    }
    # Nearly silent special tokens: an answer is not cut short by a random end of sequence.
    weights["lm_head.weight"][: len(SPECIAL)] *= 0.01
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": normal(heads * head_dim, hidden, 2.0),
            f"{prefix}self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden, 2.0),
            f"{prefix}self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden, 1.5),
            f"{prefix}self_attn.o_proj.weight": normal(hidden, heads * head_dim, 1.5),
            f"{prefix}mlp.gate_proj.weight": normal(intermediate, hidden, 1.5),
            f"{prefix}mlp.up_proj.weight": normal(intermediate, hidden, 1.5),
            f"{prefix}mlp.down_proj.weight": normal(hidden, intermediate, 1.5),
        }
    return weights


def make_tiny_model(
    out: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    intermediate: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    context: int = 2048,
) -> int:
    """Write config.json, model.safetensors and tokenizer.json to `out`; answers their size in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(vocab)
    head_dim = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    weights = build_weights(
        seed=seed,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
    )
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    return sum((out / n).stat().st_size for n in ("config.json", "model.safetensors", "tokenizer.json"))


def main(argv: list[str] | None = None) -> int:
    """Command line of the model maker."""
    parser = argparse.ArgumentParser(prog="tiny_model", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    for name, default in (
        ("seed", 0),
        ("layers", 4),
        ("hidden", 64),
        ("intermediate", 128),
        ("heads", 4),
        ("kv-heads", 2),
        ("vocab", 512),
        ("context", 2048),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = vars(parser.parse_args(argv))
    out = args.pop("out")
    size = make_tiny_model(out, **args)
    print(f"{out}: {size} bytes ({size / 1024:.0f} KiB; a ConfigMap takes 1024)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
