"""`pdcluster preflight -f FILE`: does a PDCluster fit?"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from pdoperator.api import names
from pdoperator.api.spec import PDClusterSpec
from pdoperator.api.validation import manifest_problems
from pdoperator.cli_files import model_geometry, read_yaml_documents
from pdoperator.cli_output import Unreadable
from pdoperator.domain.preflight import Finding, Preflight, preflight


def read_manifests(text: str) -> list[dict[str, Any]]:
    """PDClusters of a file of one or more YAML (or JSON) documents; other kinds are passed over."""
    documents = read_yaml_documents(text)
    flat: list[Any] = []
    for document in documents:
        if isinstance(document, dict) and isinstance(document.get("items"), list):
            flat += document["items"]
        else:
            flat.append(document)
    if not all(isinstance(d, dict) for d in flat):
        raise Unreadable("a document is not an object")
    found = [d for d in flat if d.get("kind") == names.KIND]
    if not found:
        raise Unreadable(f"it holds no {names.KIND}")
    return found


def check_manifest(manifest: dict[str, Any], model_config: str | None = None) -> Preflight:
    """Preflight of one manifest: what the API server would refuse, then what does not fit."""
    refused = tuple(
        Finding("InvalidSpec", "Fail", problem, "Correct the field; kubectl explain pdc.spec describes it.")
        for problem in manifest_problems(manifest)
    )
    try:
        spec = PDClusterSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as e:
        if refused:
            return Preflight(refused)
        return Preflight(
            tuple(
                Finding("InvalidSpec", "Fail", f"spec.{'.'.join(str(p) for p in err['loc'])}: {err['msg']}")
                for err in e.errors(include_url=False, include_context=False, include_input=False)
            )
        )
    return Preflight(refused + preflight(spec, model_geometry(model_config, spec.model.source)).findings)


def name_of(manifest: dict[str, Any]) -> str:
    """For messages."""
    meta = manifest.get("metadata") or {}
    return str(meta.get("name", "(no name)")) if isinstance(meta, dict) else "(no name)"
