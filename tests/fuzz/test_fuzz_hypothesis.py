"""The same decoders under Hypothesis, which shrinks what it finds: valid messages in which any value, at any depth, is
replaced by any JSON value or left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzz_targets import targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EVERY = targets()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
GONE = object()


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, one in inner for path in paths(one, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    key, rest = path[0], path[1:]
    made = dict(value) if isinstance(value, dict) else list(value)
    if not rest and new is GONE:
        del made[key]
    else:
        made[key] = replaced(value[key], rest, new)
    return made


@st.composite
def odd(draw: st.DrawFn, valid: bytes) -> bytes:
    lines = valid.split(b"\n")
    number = draw(st.integers(0, len(lines) - 1))
    head, body = lines[number].partition(b"{")[0], lines[number][lines[number].find(b"{") :]
    try:
        value = json.loads(body)
    except ValueError:
        return draw(st.binary(max_size=100))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(value)))
        gone = path and draw(st.integers(0, 5)) == 0
        value = replaced(value, path, GONE if gone else draw(JSON))
    lines[number] = head + json.dumps(value).encode()
    return b"\n".join(lines)


@pytest.mark.parametrize("name", [n for n in EVERY if n not in ("channel", "live-peer")])
def test_a_valid_message_with_odd_values_is_taken_or_refused(name):
    target = EVERY[name]

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(target.corpus).flatmap(odd))
    def check(data: bytes) -> None:
        assert target.run(data)

    check()


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=4), data=st.binary(max_size=60))
def test_a_stream_that_is_cut_or_spoiled_anywhere_ends_the_connection(cuts, data):
    whole = EVERY["channel"].corpus[2]
    for cut in cuts:
        whole = whole[: cut % (len(whole) + 1)] + data + whole[cut % (len(whole) + 1) :]
    assert EVERY["channel"].run(whole)
