"""Choosing tokens: greedy, seeded draws, top-k and top-p, log probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from pdtransfer.engines.reference.messages import Sampling
from pdtransfer.engines.reference.sampling import sample

LOGITS = torch.tensor([math.log(p) for p in (0.5, 0.3, 0.15, 0.05)])


def draws(how: dict[str, float], count: int = 2000) -> Counter[int]:
    return Counter(sample("r", LOGITS, Sampling(seed=s, **how), 3).token for s in range(count))  # type: ignore[arg-type]


def test_temperature_zero_and_top_k_one_take_the_best() -> None:
    assert set(draws({"temperature": 0}, 20)) == set(draws({"temperature": 5.0, "top_k": 1}, 20)) == {0}


def test_draws_follow_the_distribution() -> None:
    found = draws({"temperature": 1.0})
    assert [found[i] / 2000 for i in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)


def test_temperature_flattens() -> None:
    # p ** (1/2), normalised
    roots = [math.sqrt(p) for p in (0.5, 0.3, 0.15, 0.05)]
    found = draws({"temperature": 2.0})
    assert [found[i] / 2000 for i in range(4)] == pytest.approx([r / sum(roots) for r in roots], abs=0.04)


@pytest.mark.parametrize(
    ("how", "kept"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.5}, {0}), ({"top_p": 0.51}, {0, 1}), ({"top_p": 0.95}, {0, 1, 2})],
)
def test_top_k_and_top_p_keep_the_smallest_set_that_reaches_the_mass(how: dict[str, float], kept: set[int]) -> None:
    assert set(draws({"temperature": 1.0, **how}, 300)) == kept


def test_log_probabilities_are_of_the_temperature_scaled_distribution() -> None:
    found = sample("r", LOGITS, Sampling(temperature=0, logprob=True, top_logprobs=2), 1)
    assert found.logprob == pytest.approx(math.log(0.5), abs=1e-5)
    assert [(t, round(math.exp(p), 4)) for p, t in found.top] == [(0, 0.5), (1, 0.3)]
