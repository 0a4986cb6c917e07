"""The CRD repeats a few fit rules in CEL; pdtransfer.contract.compat is the truth they are held to."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import yaml

from pdoperator.api.cel import RULES
from pdoperator.api.validation import manifest_problems
from pdtransfer.contract import compat
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.facts import HostKVMode, RoleFacts

REPEATED = {rule.compat for rule in RULES if rule.compat}
# (prefill TP, attention DP, PP), (decode TP, attention DP, PP)
SIZES = [
    ((1, 1, 1), (1, 1, 1)),
    ((2, 1, 1), (1, 1, 1)),
    ((1, 1, 1), (4, 1, 1)),
    ((3, 1, 1), (2, 1, 1)),
    ((6, 1, 1), (4, 1, 1)),
    ((6, 2, 1), (4, 4, 1)),
    ((8, 2, 1), (6, 2, 1)),
    ((6, 4, 1), (2, 1, 1)),
    ((2, 1, 1), (4, 8, 1)),
    ((2, 1, 4), (2, 1, 1)),
    ((2, 1, 4), (2, 1, 4)),
    ((2, 1, 4), (2, 1, 2)),
    ((2, 1, 1), (2, 1, 2)),
]


def _facts(role: Role, sizes: tuple[int, int, int], backend: Backend) -> RoleFacts:
    tensor, attention, pipeline = sizes
    return RoleFacts(
        role=role,
        backend=backend,
        tensor_parallel=tensor,
        attention_data_parallel=attention,
        pipeline_parallel=pipeline,
    )


def _failing(prefill: tuple[int, int, int], decode: tuple[int, int, int], backend: Backend) -> set[str]:
    report = compat.check(_facts(Role.PREFILL, prefill, backend), _facts(Role.DECODE, decode, backend), backend)
    return {finding.rule for finding in report.findings if finding.status.value == "Fail"} & REPEATED


def _document(name: str, sizes: Any, backend: Backend) -> dict[str, Any]:
    def role(values: tuple[int, int, int]) -> dict[str, int]:
        return {
            "tensorParallelSize": values[0],
            "attentionDataParallelSize": values[1],
            "pipelineParallelSize": values[2],
        }

    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"source": "m"},
            "engine": {"image": "i"},
            "transfer": {"backend": backend.value, "fabric": {"type": "TCP"}},
            "prefill": role(sizes[0]),
            "decode": role(sizes[1]),
        },
    }


def test_rules_that_are_repeated_exist() -> None:
    assert {"A2", "A3", "A8", "E3", "E4"} == REPEATED


@pytest.mark.apiserver
def test_the_api_server_refuses_what_these_rules_fail_and_nothing_else(crd_server: Any) -> None:
    cases = {f"c{index}": case for index, case in enumerate(product(SIZES, Backend))}
    documents = [_document(name, *case) for name, case in cases.items()]
    result = crd_server.kubectl(
        "apply", "--dry-run=server", "-o", "name", "-f", "-", stdin=yaml.safe_dump_all(documents)
    )
    accepted = {line.rsplit("/", 1)[1] for line in result.stdout.split()}
    expected = {name for name, (sizes, backend) in cases.items() if not _failing(*sizes, backend)}
    assert accepted == expected
    assert {document["metadata"]["name"] for document in documents if not manifest_problems(document)} == expected
    assert 0 < len(expected) < len(cases)


@pytest.mark.apiserver
def test_context_parallelism_in_extra_args_leaves_the_decision_to_the_fit_check(crd_server: Any) -> None:
    """Attention TP is then not what the two fields say: 6/2 = 3 against 3."""
    document = _document("cp", ((6, 1, 1), (4, 1, 1)), Backend.PDCLUSTER)
    document["spec"]["prefill"]["extraArgs"] = ["--attn-cp-size", "3"]
    result = crd_server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=document)
    assert result.returncode == 0, result.stderr


CACHES = list(
    product(
        (False, True),  # radixCache
        (None, "Cache", "Offload"),  # hierarchicalCache.mode
        (None, "file"),  # hierarchicalCache.storageBackend
        (None, "cpu_tensor", "host_pool"),  # retractionBackup
        (HostKVMode.OFF, HostKVMode.HISPARSE),
    )
)


def _caches_fail(radix: bool, mode: str | None, store: str | None, backup: str | None, host: HostKVMode) -> bool:
    """What the fit rules say to decode's side; the hierarchical cache turns the radix cache on (rule E2)."""
    decode = RoleFacts(
        role=Role.DECODE,
        decode_radix_cache=radix or mode == "Cache",
        hierarchical_cache=mode == "Cache",
        decode_offload=mode == "Offload",
        hicache_storage_backend=(store or "") if mode else "",
        retraction_backup=backup or "",
        host_kv=host,
    )
    report = compat.check(RoleFacts(role=Role.PREFILL), decode, Backend.PDCLUSTER)
    return any(f.rule in ("E3", "E4") and f.status.value == "Fail" for f in report.findings)


@pytest.mark.apiserver
def test_the_api_server_refuses_the_caches_that_exclude_one_another(crd_server: Any) -> None:
    documents = []
    for index, (radix, mode, store, backup, host) in enumerate(CACHES):
        document = _document(f"c{index}", ((1, 1, 1), (1, 1, 1)), Backend.PDCLUSTER)
        decode = document["spec"]["decode"]
        decode |= {"radixCache": radix, "hostKV": {"mode": host.value}}
        if mode:
            decode["hierarchicalCache"] = {"mode": mode} | ({"storageBackend": store} if store else {})
        if backup:
            decode["retractionBackup"] = backup
        documents.append(document)
    result = crd_server.kubectl(
        "apply", "--dry-run=server", "-o", "name", "-f", "-", stdin=yaml.safe_dump_all(documents)
    )
    accepted = {line.rsplit("/", 1)[1] for line in result.stdout.split()}
    expected = {f"c{index}" for index, case in enumerate(CACHES) if not _caches_fail(*case)}
    assert accepted == expected
    assert {document["metadata"]["name"] for document in documents if not manifest_problems(document)} == expected
    assert 0 < len(expected) < len(CACHES)
