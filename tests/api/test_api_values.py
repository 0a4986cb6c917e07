"""Quantities, int-or-percent values, timestamps and the schema walker, against hand-computed values."""

from __future__ import annotations

from decimal import Decimal

import pytest

from pdoperator.api.quantities import parse_quantity, scaled
from pdoperator.api.status import parse_timestamp, timestamp
from pdoperator.api.structural import problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10G", 10_000_000_000),
        ("64Gi", 68_719_476_736),
        ("1.5Ki", 1536),
        ("250m", Decimal("0.25")),
        ("1e3", 1000),
        (7, 7),
        ("-1", -1),
        ("1E", 10**18),
        # Kubernetes caps what does not fit in 64 bits.
        ("1e999", 2**63 - 1),
        ("-1e99", -(2**63) + 1),
        ("99999999999999999999Ei", 2**63 - 1),
    ],
)
def test_quantities(text: str | int, value: int | Decimal) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "fast", "1 G", "1GB", "0x10", "1e", "--1", "1G\n", "1e9999999999999999999"])
def test_what_is_no_quantity_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


def test_percentages_round_as_deployments_do() -> None:
    assert scaled("25%", 10, round_up=True) == 3
    assert scaled("25%", 10, round_up=False) == 2
    assert scaled(4, 10, round_up=True) == 4
    assert scaled("4", 10, round_up=False) == 4
    with pytest.raises(ValueError, match="neither a number nor a percentage"):
        scaled("some", 10, round_up=True)


def test_timestamps_are_those_of_kubernetes() -> None:
    assert timestamp(1_796_000_461.9) == "2026-11-30T01:01:01Z"
    assert parse_timestamp("2026-11-30T01:01:01Z") == 1_796_000_461.0
    with pytest.raises(ValueError, match="time zone"):
        parse_timestamp("2026-11-30T01:01:01")


SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
        "ratio": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        "items": {
            "type": "array",
            "maxItems": 2,
            "items": {"type": "object", "properties": {"k": {"type": "string"}}},
            "x-kubernetes-list-map-keys": ["k"],
        },
        "count": {"x-kubernetes-int-or-string": True},
    },
}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "name is required"),
        ({"name": "abcd"}, "name: length must be at most 3"),
        ({"name": "A"}, "name: 'A' does not match"),
        ({"name": 1}, "name: must be of type string"),
        ({"name": "a", "nam": 1}, "nam: unknown field"),
        ({"name": "a", "ratio": 0}, "ratio: it must be more than 0"),
        ({"name": "a", "ratio": True}, "ratio: must be of type number"),
        ({"name": "a", "count": True}, "count: must be an integer or a string"),
        ({"name": "a", "items": [{"k": "x"}, {"k": "x"}]}, "items: duplicate x"),
        ({"name": "a", "items": [{"x": 1}]}, "items[0].x: unknown field"),
        ({"name": "a", "items": [{"k": {}}, {"k": [1]}]}, "items[0].k: must be of type string"),
        ({"name": "a", "items": [{}, {}, {}]}, "items must be at most 2"),
    ],
)
def test_the_schema_walker_says_what_is_wrong_and_where(value: object, says: str) -> None:
    assert any(says in line for line in problems(value, SCHEMA)), problems(value, SCHEMA)


def test_a_schema_that_uses_more_than_is_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="not supported: oneOf"):
        problems({}, {"oneOf": []})
