"""The reference that the other tests compare with: SGLang that is not disaggregated, at TP 2, where sums have another
order than transformers', gives the tokens of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

from kit_model import make_model
from kit_pair import plain
from kit_server import CHUNK, PAGE, Setting
from reference_kit import Truth

pytestmark = pytest.mark.timeout(3600)


def test_sglang_that_is_not_disaggregated_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    truth = Truth(model)
    with plain(Setting(model, ""), tmp_path, tp=2) as server:
        for length in (1, PAGE, CHUNK + 1, 1000):
            prompt, expected = truth.decided(length, 8)
            assert server.generate(prompt, 8).json()["output_ids"] == expected
