"""The check of the other tests is able to fail: had one page of KV not arrived, the tokens would be others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_model import make_model
from kit_server import PAGE
from reference_kit import Truth

NEW = 8


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(make_model(tmp_path_factory.mktemp("model")))


@torch.no_grad()
def without_page(truth: Truth, prompt: list[int], page: int | None) -> list[int]:
    """Greedy tokens over a KV cache in which one page of the prompt is zero."""
    answer = truth.net(torch.tensor([prompt]), use_cache=True)
    cache = answer.past_key_values
    lost = slice(0, 0) if page is None else slice(page * PAGE, (page + 1) * PAGE)
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            rows[:, :, lost] = 0
    tokens = [int(answer.logits[0, -1].argmax())]
    for _ in range(NEW - 1):
        answer = truth.net(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        tokens.append(int(answer.logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 63, 199])
def test_any_lost_page_changes_the_tokens(truth: Truth, length: int) -> None:
    prompt, expected = truth.decided(length, NEW)
    assert without_page(truth, prompt, None) == expected
    for page in range(-(-length // PAGE)):
        assert without_page(truth, prompt, page) != expected, f"page {page}"
