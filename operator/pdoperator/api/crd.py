"""Generates the CustomResourceDefinition, and the chart's template of it, from the pydantic models.

    python -m pdoperator.api.crd [--check] [--out crds/]

A CRD takes less than JSON Schema: everything is inlined, nullable unions become optional fields, there is no
const, title or additionalProperties: false, and an exclusive bound is a flag. Unknown fields are refused by the
API server's strict field validation, because no level of ours preserves them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from pdoperator.api import names
from pdoperator.api.cel import RULES
from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.status import PDClusterStatus

Schema = dict[str, Any]
CRD_NAME = f"{names.PLURAL}.{names.GROUP}"
CRD_FILE = f"{names.GROUP}_{names.PLURAL}.yaml"
CHART_TEMPLATE = Path("charts/pdcluster/templates/crd.yaml")
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_DROPPED = frozenset({"title", "$defs", "default", "additionalProperties", "const", "$ref", *_EXCLUSIVE})


def _condition(field: str) -> str:
    return f'.status.conditions[?(@.type=="Ready")].{field}'


COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": _condition("status")},
    {"name": "Reason", "type": "string", "jsonPath": _condition("reason")},
    {
        "name": "Prefill",
        "type": "string",
        "jsonPath": ".status.summary.prefill",
        "description": "Ready and wanted prefill replicas.",
    },
    {
        "name": "Decode",
        "type": "string",
        "jsonPath": ".status.summary.decode",
        "description": "Ready and wanted decode replicas.",
    },
    {
        "name": "Wired",
        "type": "string",
        "jsonPath": ".status.summary.wired",
        "description": "Wired and wanted pairs of pods.",
    },
    {
        "name": "Verified",
        "type": "string",
        "jsonPath": ".status.summary.verified",
        "description": "Measured bandwidth and transport of the KV path.",
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Message", "type": "string", "jsonPath": _condition("message"), "priority": 1},
)


def structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """A pydantic JSON schema as the structural schema of a CRD. `definitions` are its $defs."""
    replacement = schema.get("x-pd-schema")
    if replacement is not None:
        return _with_description(dict(replacement), schema)
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return structural({**target, **{key: value for key, value in schema.items() if key != "$ref"}}, definitions)
    if "anyOf" in schema:
        return _optional(schema, definitions)
    result: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: _property(inner, definitions) for name, inner in value.items()}
        elif key == "items":
            result[key] = structural(value, definitions)
        elif key == "description":
            result[key] = " ".join(value.split())
        elif key not in _DROPPED and not key.startswith("x-pd-"):
            result[key] = value
    if "const" in schema:
        result["enum"] = [schema["const"]]
    for mark, bound in _EXCLUSIVE.items():
        if mark in schema:
            result |= {bound: schema[mark], mark: True}
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        result["additionalProperties"] = structural(extra, definitions)
    elif extra is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    return result


def _optional(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """`X | None`: an absent field says None. Any other union has no place in a structural schema."""
    kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
    if len(kinds) != 1:
        raise ValueError(f"a union can't be expressed in a CRD: {schema}")
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return structural({**kinds[0], **rest}, definitions)


def _with_description(result: Schema, schema: Schema) -> Schema:
    if "description" in schema:
        result["description"] = " ".join(schema["description"].split())
    for key in ("x-kubernetes-list-type", "x-kubernetes-list-map-keys"):
        if key in schema:
            result[key] = schema[key]
    return result


def _property(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    result = structural(schema, definitions)
    default = schema.get("default")
    if default is None or schema.get("x-pd-no-default") or (default in ([], "") and result.get("type") != "object"):
        return result
    if isinstance(default, dict):
        # {} makes the API server fill in the defaults below it; where there are none it would only be noise.
        return {**result, "default": {}} if "x-pd-schema" not in schema and _fills_in(result) else result
    return {**result, "default": default}


def _fills_in(schema: Schema) -> bool:
    return any("default" in inner for inner in schema.get("properties", {}).values())


def _drop_defaults(schema: Schema) -> Schema:
    """Status has none: what was not observed is absent."""
    result = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in result:
        result["properties"] = {name: _drop_defaults(inner) for name, inner in result["properties"].items()}
    if "items" in result:
        result["items"] = _drop_defaults(result["items"])
    return result


def _model_schema(model: type[PDClusterSpec] | type[PDClusterStatus]) -> Schema:
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return structural(raw, raw.get("$defs", {}))


def _at(schema: Schema, path: tuple[str, ...]) -> Schema:
    for step in path:
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return schema


def object_schema() -> Schema:
    """openAPIV3Schema of a whole PDCluster, with its CEL rules."""
    schema: Schema = {
        "type": "object",
        "description": "PDCluster serves one model with prefill and decode in separate pods, and moves the KV cache "
        "between them over a fabric that is checked before traffic. Whoever may create one may create pods.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the schema of this object."},
            "kind": {"type": "string", "description": names.KIND},
            "metadata": {"type": "object"},
            "spec": _model_schema(PDClusterSpec),
            "status": _drop_defaults(_model_schema(PDClusterStatus)),
        },
    }
    for rule in RULES:
        _at(schema, rule.path).setdefault("x-kubernetes-validations", []).append(rule.to_dict())
    return schema


def build() -> dict[str, Any]:
    """The CustomResourceDefinition as a dict."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["pdc"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [dict(column) for column in COLUMNS],
                    "schema": {"openAPIV3Schema": object_schema()},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """No anchors: a CRD is read by people and by tools that know none."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(document: dict[str, Any]) -> str:
    """Stable YAML in the models' order."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


_HEADER = "# Generated by `python -m pdoperator.api.crd` from the models in operator/pdoperator/api. Do not edit.\n"


def crd_text() -> str:
    """Contents of crds/pdcluster.io_pdclusters.yaml."""
    return _HEADER + to_yaml(build())


def chart_text() -> str:
    """Contents of the chart's template: upgraded with the chart, kept when it is uninstalled (removing the
    CRD would remove every PDCluster)."""
    body = to_yaml(build())
    if "{{" in body:
        raise ValueError("the CRD's text holds '{{', which Helm would take for a template action")
    head = "metadata:\n  name: "
    assert body.count(head) == 1
    body = body.replace(
        head,
        "metadata:\n  annotations:\n    helm.sh/resource-policy: keep\n  labels:\n"
        '    {{- include "pdcluster.labels" . | nindent 4 }}\n  name: ',
    )
    return _HEADER + "{{- if .Values.crd.install }}\n" + body + "{{- end }}\n"


def main(arguments: list[str] | None = None) -> int:
    """Write both files, or with --check exit 1 when they differ from what would be written."""
    parser = argparse.ArgumentParser(prog="python -m pdoperator.api.crd", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 on a difference")
    parser.add_argument("--out", type=Path, default=Path("crds"), help="folder of the plain CRD")
    parser.add_argument("--chart", type=Path, default=CHART_TEMPLATE, help="the chart's template")
    options = parser.parse_args(arguments)
    drift = 0
    for path, text in ((options.out / CRD_FILE, crd_text()), (options.chart, chart_text())):
        if path.is_file() and path.read_text() == text:
            continue
        if options.check:
            print(f"{path} is out of date: run `python -m pdoperator.api.crd`", file=sys.stderr)
            drift = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    return drift


if __name__ == "__main__":
    sys.exit(main())
