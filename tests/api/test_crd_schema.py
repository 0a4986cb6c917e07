"""The generated schema against the models and against what a CRD may contain; no API server needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pdoperator.api import crd
from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.status import PDClusterStatus
from pdoperator.api.structural import problems

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = crd.object_schema()
SPEC = SCHEMA["properties"]["spec"]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (path, schema) below and including `schema`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], f"{path}[]")


def test_the_files_are_up_to_date() -> None:
    arguments = ["--check", "--out", str(ROOT / "crds"), "--chart", str(ROOT / crd.CHART_TEMPLATE)]
    assert crd.main(arguments) == 0, "run `python -m pdoperator.api.crd`"


def test_check_reports_drift_and_writing_repairs_it(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "crds"), "--chart", str(tmp_path / "crd.yaml")]
    assert crd.main(["--check", *arguments]) == 1
    assert not (tmp_path / "crds").exists()
    assert crd.main(arguments) == 0
    assert crd.main(["--check", *arguments]) == 0
    (tmp_path / "crd.yaml").write_text("changed")
    assert crd.main(["--check", *arguments]) == 1


def test_only_what_a_structural_schema_allows() -> None:
    forbidden = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "additionalItems"}
    for path, schema in walk(SCHEMA):
        assert not forbidden & set(schema), path
        assert schema.get("additionalProperties") is not False, path
        assert not any(key.startswith("x-pd-") for key in schema), path
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path


def test_every_field_of_ours_says_what_it_is_for() -> None:
    bare = [
        path
        for path, schema in walk(SCHEMA)
        if path and not path.endswith("[]") and path != ".metadata" and "description" not in schema
    ]
    # Pieces of Kubernetes' own types are explained by Kubernetes.
    foreign = ("valueFrom", "tolerations", "volumeMounts", "volumes[]", "imagePullSecrets", "claims[]")
    assert [path for path in bare if not any(part in path for part in foreign)] == []


def test_unknown_fields_are_kept_on_foreign_objects_only() -> None:
    kept = {path for path, schema in walk(SCHEMA) if schema.get("x-kubernetes-preserve-unknown-fields")}
    templates = [".spec.prefill.template", ".spec.decode.template", ".spec.router.template"]
    expected = {f".spec.{role}.hierarchicalCache.storageConfig" for role in ("prefill", "decode")}
    expected |= {".spec.model.volume"}
    for template in templates:
        expected |= {
            f"{template}.affinity",
            f"{template}.topologySpreadConstraints[]",
            f"{template}.securityContext",
            f"{template}.containerSecurityContext",
            f"{template}.volumes[]",
        }
    assert kept == expected


def test_cel_cost_is_bounded_wherever_a_rule_reads() -> None:
    """Arrays, maps and strings under spec have an upper bound, or the API server refuses the CRD."""
    for path, schema in walk(SPEC):
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        if schema.get("type") == "string" and "enum" not in schema:
            assert "maxLength" in schema, path
        if isinstance(schema.get("additionalProperties"), dict):
            assert "maxProperties" in schema, path


def test_names_are_camel_case_and_those_of_the_design() -> None:
    assert set(SPEC["properties"]) == {
        "model", "engine", "kvCache", "transfer", "prefill", "decode", "router", "rollout",
    }  # fmt: skip
    assert "hostKV" in SPEC["properties"]["decode"]["properties"]
    assert "hostKV" not in SPEC["properties"]["prefill"]["properties"]
    assert SPEC["required"] == ["model", "engine"]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_parse_and_fit_the_schema(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert problems(document["spec"], SPEC, "spec") == []
    PDClusterSpec.model_validate(document["spec"])


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server stores: absent fields take the schema's defaults, level by level."""
    if isinstance(value, dict):
        value = dict(value)
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                value[name] = _with_defaults(value[name], inner)
    return value


MINIMAL: dict[str, Any] = {"model": {"source": "m"}, "engine": {"image": "i"}}


def test_the_servers_defaults_are_the_models_defaults() -> None:
    stored = _with_defaults(MINIMAL, SPEC)
    assert PDClusterSpec.model_validate(stored) == PDClusterSpec.model_validate(MINIMAL)
    assert stored["decode"]["hostKV"] == {"mode": "Off"}


_ROLE = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(-2, 1030),
        "tensorParallelSize": st.integers(0, 9),
        "extraArgs": st.lists(st.text(max_size=5), max_size=3),
        "resources": st.dictionaries(st.sampled_from(["limits", "requests", "limit"]), st.just({"cpu": 1})),
        "env": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["A", "1", "A B"])}), max_size=1),
        "bogus": st.just(1),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        MINIMAL | {"model": st.sampled_from([{"source": "m"}, {"volume": {}}, {"source": ""}])}
        | {"engine": st.sampled_from([{"image": "i"}, {"image": "i", "version": "new"}, {}])},
        optional={
            "prefill": _ROLE,
            "kvCache": st.fixed_dictionaries(
                {}, optional={"pageSize": st.integers(-1, 5000), "dtype": st.text("aB_1", max_size=3)}
            ),
            "rollout": st.fixed_dictionaries({}, optional={"maxSurge": st.sampled_from([1, "10%", True, 1.5])}),
        },
    )
)  # fmt: skip
def test_schema_and_models_accept_the_same_specs(spec: dict[str, Any]) -> None:
    """Two implementations of one contract: the schema walker knows nothing of pydantic."""
    found = problems(spec, SPEC, "spec")
    try:
        PDClusterSpec.model_validate(spec)
    except ValidationError as error:
        assert found, f"only the models refuse: {error}"
    else:
        assert found == []


def test_a_full_status_fits_the_schema() -> None:
    status = PDClusterStatus.model_validate(
        {
            "observedGeneration": 3,
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "observedGeneration": 3,
                    "lastTransitionTime": "2026-11-29T15:00:00Z",
                    "reason": "AllReady",
                    "message": "",
                }
            ],
            "summary": {"prefill": "1/1", "decode": "2/2", "wired": "2/2", "verified": "1.2 GB/s tcp"},
            "revision": "0a1b2c3d",
            "prefill": {"wanted": 1, "byRevision": [{"revision": "0a1b2c3d", "pods": 1, "ready": 1}]},
            "wired": {"wired": 2, "wanted": 2},
            "rosterKey": {"term": 1, "counter": 7},
            "verification": {
                "bytes": 65536,
                "seconds": 0.01,
                "bandwidth": 6553600,
                "transport": "tcp",
                "emulated": True,
                "when": "2026-11-29T15:00:00Z",
                "pairs": 2,
            },
            "warnings": [{"rule": "A5", "message": "slow", "action": "use equal TP"}],
            "backoff": [{"role": "prefill", "replica": 0, "failures": 1}],
            "certificates": {"notAfter": "2026-12-29T15:00:00Z", "fingerprint": "ab"},
        }
    )
    written = status.to_dict()
    assert problems(written, SCHEMA["properties"]["status"], "status") == []
    assert written["conditions"][0]["lastTransitionTime"] == "2026-11-29T15:00:00Z"
    assert "router" not in written
    assert "default" not in str(sorted({key for _, each in walk(SCHEMA["properties"]["status"]) for key in each}))


def test_printer_columns_read_fields_that_status_has() -> None:
    columns = crd.build()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]
    assert shown == ["Ready", "Reason", "Prefill", "Decode", "Wired", "Verified", "Age"]
    for column in columns:
        path = column["jsonPath"]
        if path.startswith(".status.summary."):
            assert path.rsplit(".", 1)[1] in SCHEMA["properties"]["status"]["properties"]["summary"]["properties"]
