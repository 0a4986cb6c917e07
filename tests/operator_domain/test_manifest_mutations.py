"""Whatever stands in a manifest, `pdcluster preflight -f` and the operator get findings of it, never an exception."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdoperator.cli_manifests import check_manifest

EXAMPLE = yaml.safe_load((Path(__file__).parents[2] / "examples" / "sglang.yaml").read_text())
MORE: dict[str, dict[str, Any]] = {
    "prefill": {
        "env": [{"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "hierarchicalCache": {"layout": "page_first", "storageBackend": "file", "storageConfig": {"a": 1}},
        "template": {"nodeSelector": {"nvidia.com/gpu.compute.major": "9"}},
    },
    "decode": {
        "hierarchicalCache": {"mode": "Cache", "ratio": 2},
        "retractionBackup": "host_pool",
        "radixCache": True,
        "env": [{"name": "SGLANG_DISAGG_STAGING_BUFFER", "value": "1"}],
    },
    "transfer": {"plugin": {"name": "LIBFABRIC", "parameters": {"num_threads": "4"}}},
}
for part, fields in MORE.items():
    EXAMPLE["spec"][part] = {**EXAMPLE["spec"][part], **fields}

Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


PLACES = [p for p in places(EXAMPLE) if p[0] in ("spec", "metadata")]
VALUES: list[Any] = [
    None, True, 0, -1, 10**30, 1.5, float("nan"), "", "x", "\x00", "\udcff", "a" * 5000, "1e999", "-5Gi", "64Gi",
    "$(X)", [], [None], {}, {"a": 1}, {"a": {}}, ["--tp", "2"], ["--page-size=32"], ["--chunked-prefill-size", "$(N)"],
    ["--speculative-algorithm", "EAGLE"], "NIXL", "Mooncake", "HiSparse", "Reference",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(VALUES)), min_size=1, max_size=3))
@example([(("spec", "decode", "hostKV", "size"), "1e999")])
@example([(("spec", "prefill", "env", 0, "name"), {})])
def test_any_manifest_gets_findings(changes: list[tuple[Place, Any]]) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    for place, value in changes:
        inner = manifest
        try:
            for key in place[:-1]:
                inner = inner[key]  # type: ignore[index]
            inner[place[-1]] = copy.deepcopy(value)  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            continue  # An earlier change took its parent away.
    result = check_manifest(manifest)
    assert result.findings and result.verdict in ("Pass", "Unknown", "Fail")
    assert json.dumps([f.to_dict() for f in result.findings])
