"""Numbers that a rank tells its sidecar are bounded: what is listed one by one can not be listed without end."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from sidecar_kit import CLUSTER, POD, card

from pdtransfer.contract.base import Role
from pdtransfer.contract.link import MAX_RANKS, Hello, rank_messages
from pdtransfer.sidecar import model, views
from pdtransfer.sidecar import state as st

EMPTY = model.PodState(identity=model.Identity(cluster_uid=CLUSTER, pod_uid=POD, role=Role.PREFILL))


@pytest.mark.parametrize("ranks", [0, -1, MAX_RANKS + 1, 1 << 40])
def test_a_rank_that_expects_an_impossible_number_of_ranks_is_refused_by_name(ranks: int) -> None:
    line = (
        Hello(card=card(0), expected_ranks=2)
        .model_dump_json()
        .replace('"expected_ranks":2', f'"expected_ranks":{ranks}')
    )
    with pytest.raises(ValidationError, match="expected_ranks"):
        rank_messages.validate_json(line)


def test_the_largest_number_is_counted() -> None:
    state, _ = st.hello(EMPTY, 1, Hello(card=card(0), expected_ranks=MAX_RANKS), 0.0)
    text = views.readiness(state, 0.0, True, "", "").text
    named = text.count("not registered")
    # 4095 ranks and the missing roster, of which the text shows the first ones.
    assert named > 0 and f"and {MAX_RANKS - named} more" in text
