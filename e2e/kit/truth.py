"""What the answer must be: the same checkpoint run by `transformers` in one process, not disaggregated.

Equality of tokens means something only when the model was sure: every compared step has a margin
between its best and second best logit that is far above float32 noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIN_MARGIN = 1e-2
"""Logits. Float32 sums in another order move a logit of this model by about 1e-5."""


@dataclass(frozen=True)
class Expected:
    """A prompt, its greedy continuation and the smallest top-2 logit margin on the way."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margin: float


def expected(model: Path, *, prompts: int, length: int, new_tokens: int, seed: int = 7) -> list[Expected]:
    """`prompts` random prompts of about `length` tokens whose continuations are decided by MIN_MARGIN.

    Raises ValueError when the model gives too few such prompts (it would be too flat to test with)."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    vocabulary = int(net.config.vocab_size)
    found: list[Expected] = []
    for attempt in range(prompts * 8):
        # Lengths around page borders: a page short, exact, one over.
        size = max(2, length + (attempt % 5) - 2)
        ids = torch.randint(3, vocabulary, (1, size))
        tokens: list[int] = []
        margin = float("inf")
        with torch.no_grad():
            cache = DynamicCache(config=net.config)
            out = net(ids, cache=cache, use_cache=True)
            for _ in range(new_tokens):
                best = torch.topk(out.logits[0, -1], 2)
                margin = min(margin, float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
                out = net(best.indices[:1].view(1, 1), cache=cache, use_cache=True)
        if margin >= MIN_MARGIN:
            found.append(Expected(tuple(ids[0].tolist()), tuple(tokens), margin))
        if len(found) == prompts:
            return found
    raise ValueError(f"only {len(found)} of {prompts} prompts have a top-2 logit margin of {MIN_MARGIN}")
