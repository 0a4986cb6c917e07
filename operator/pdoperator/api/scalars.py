"""Bounded scalars of the spec: every string, map and list has a limit, so that the cost of CEL rules has one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, StringConstraints

from pdoperator.api.kubetypes import QUANTITY, QUANTITY_PATTERN

MAX_RANKS = 1024
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
LayerId = Annotated[StrictInt, Field(ge=0, le=4095)]
StringMap = dict[str, Annotated[str, StringConstraints(max_length=4096)]]
Quantity = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=64),
    Field(json_schema_extra={"x-pd-schema": QUANTITY}, coerce_numbers_to_str=True),
]
MAP: dict[str, Any] = {"maxProperties": 64}
NAMED: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
