"""Prefill at TP 1, decode at TP 2: each decode rank gets its share of every page."""

from __future__ import annotations

import pytest

from e2e.kit import sglang
from e2e.suite_sglang.conftest import Served

TP = (1, 2)
pytestmark = pytest.mark.timeout(3000)


def test_two_decode_ranks_answer_like_transformers_and_plain_sglang(served: Served) -> None:
    assert len(sglang.processes(served.kubectl, served.pod("decode")["metadata"]["name"], "sglang::scheduler")) == 2
    served.exact()
