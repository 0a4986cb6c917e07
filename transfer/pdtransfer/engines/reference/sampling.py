"""Chooses the next token from logits: greedy, or a seeded draw with temperature, top-k and top-p."""

from __future__ import annotations

import torch

from pdtransfer.engines.reference.messages import Sampled, Sampling


def sample(rid: str, logits: torch.Tensor, how: Sampling, position: int) -> Sampled:
    """Token for logits [vocab]. Log probabilities are of the distribution drawn from (before top-k and
    top-p); a greedy choice reports those at temperature 1, as SGLang does."""
    greedy = how.temperature <= 0 or how.top_k == 1
    scaled = logits if greedy else logits / how.temperature
    token = int(torch.argmax(logits)) if greedy else _draw(scaled, how, position)
    if not how.logprob:
        return Sampled(rid, token)
    logprobs = torch.log_softmax(scaled, dim=-1)
    best = torch.topk(logprobs, min(how.top_logprobs, logprobs.numel()))
    pairs = tuple(zip(best.values.tolist(), best.indices.tolist(), strict=True))
    return Sampled(rid, token, float(logprobs[token]), pairs)


def _draw(scaled: torch.Tensor, how: Sampling, position: int) -> int:
    probabilities = torch.softmax(scaled, dim=-1)
    ordered, ids = probabilities.sort(descending=True)
    if how.top_k > 0:
        ordered[how.top_k :] = 0
    # Keep the smallest set whose mass reaches top_p: a token stays while the mass before it is below.
    ordered[(ordered.cumsum(0) - ordered) >= how.top_p] = 0
    generator = torch.Generator().manual_seed((how.seed * 1_000_003 + position) % (1 << 63))
    return int(ids[torch.multinomial(ordered, 1, generator=generator)])
