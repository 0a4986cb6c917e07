"""Base of the API's models: camelCase on the wire, unknown fields refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

NO_CRD_DEFAULT: dict[str, Any] = {"x-pd-no-default": True}
"""json_schema_extra of a field whose default is the operator's and may be tuned by a later release: the
CRD leaves it unset, so that stored objects do not freeze today's number."""


class ApiModel(BaseModel):
    """A frozen piece of a PDCluster. JSON names are camelCase, a typo in a name is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, use_enum_values=False
    )
