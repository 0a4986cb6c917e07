"""Fields of the spec on their way to the engines: as flags of Reference, as environment of SGLang's plugin, and in the
revision where they change pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from domain_makers import quickstart

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.container_env import OWN_ENV
from pdoperator.domain.engine_command import NodePlace, engine_command, whole_gb
from pdoperator.domain.facts import accelerator, engine_version, spec_facts
from pdoperator.domain.revision import role_revision, role_spec
from pdoperator.domain.transfer_settings import PLUGIN_ENV, setting_env, whole_mib
from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.engines.reference.options import Options, parse_options

SGLANG = {"type": "SGLang", "image": "sg:1"}
ALL = {
    "transfer__strategy": "Staged",
    "transfer__digest": True,
    "transfer__stagingSize": "96Mi",
    "transfer__quarantineSize": "1Gi",
}


def spec_of(**changes: Any) -> PDClusterSpec:
    return PDClusterSpec.model_validate(quickstart(**changes))


def reference(spec: PDClusterSpec, role: Role) -> Options:
    """The composed line as the Reference engine's own parser reads it."""
    command, args = engine_command(spec, role, role_spec(spec, role))
    assert command == ["pdtransfer-reference"]
    return parse_options(args)


def test_reference_reads_what_the_spec_says() -> None:
    prefill, decode = (reference(spec_of(**ALL), role) for role in Role)
    assert (decode.kv_strategy, decode.kv_digest) == ("staged", True)
    assert (decode.kv_staging_mib, decode.kv_quarantine_mib) == (96, 1024)
    # Strategy, digest and quarantine are decode's: Reference refuses the first two on prefill.
    assert (prefill.kv_strategy, prefill.kv_digest) == ("auto", False)
    assert (prefill.kv_staging_mib, prefill.kv_quarantine_mib) == (96, None)
    assert (prefill.tp_size, decode.tp_size) == (2, 1)
    assert (prefill.mode, decode.mode) == ("prefill", "decode")
    assert prefill.model_path == Path("/mnt/models") and prefill.page_size == 16


def test_what_the_spec_leaves_alone_is_the_modules_own_default() -> None:
    for role in Role:
        read = reference(spec_of(), role)
        plain = Options(model_path=Path("m"), served_model_name="m")
        for name in ("kv_strategy", "kv_digest", "kv_staging_mib", "kv_quarantine_mib"):
            assert getattr(read, name) == getattr(plain, name)
        assert setting_env(spec_of(engine=SGLANG), role) == []


def test_sglangs_plugin_gets_the_same_as_environment() -> None:
    spec = spec_of(engine=SGLANG, **ALL)
    assert {e["name"]: e["value"] for e in setting_env(spec, Role.DECODE)} == {
        "PDTRANSFER_STRATEGY": "staged",
        "PDTRANSFER_DIGEST": "1",
        "PDTRANSFER_STAGING_MIB": "96",
        "PDTRANSFER_QUARANTINE_MIB": "1024",
    }
    assert setting_env(spec, Role.PREFILL) == [{"name": "PDTRANSFER_STAGING_MIB", "value": "96"}]
    assert setting_env(spec_of(engine=SGLANG, transfer__backend="NIXL", **ALL), Role.DECODE) == []
    assert set(PLUGIN_ENV) <= set(OWN_ENV)


def test_no_staging_is_a_setting_too() -> None:
    spec = spec_of(transfer__stagingSize=0)
    assert reference(spec, Role.PREFILL).kv_staging_mib == 0
    assert setting_env(spec_of(engine=SGLANG, transfer__stagingSize="0"), Role.DECODE) == [
        {"name": "PDTRANSFER_STAGING_MIB", "value": "0"}
    ]


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        ({"transfer__strategy": "Merge"}, {Role.DECODE}),
        ({"transfer__digest": True}, {Role.DECODE}),
        ({"transfer__quarantineSize": "1Gi"}, {Role.DECODE}),
        ({"transfer__stagingSize": "32Mi"}, set(Role)),
        ({"decode__radixCache": True}, {Role.DECODE}),
        ({"decode__hostKV": {"mode": "HostReceive", "threshold": 0.5}}, {Role.DECODE}),
        ({"prefill__hierarchicalCache": {"ratio": 2}}, {Role.PREFILL}),
        ({"transfer__verification": {"minBandwidth": "1G"}}, set()),
        # Said or not, it is the default: nothing rolls.
        ({"transfer__strategy": "Auto", "transfer__digest": False, "decode__radixCache": False}, set()),
    ],
)
def test_a_setting_rolls_the_pods_that_it_changes_and_no_others(change: dict[str, Any], rolls: set[Role]) -> None:
    before, after = spec_of(), spec_of(**change)
    assert {role for role in Role if role_revision(before, role) != role_revision(after, role)} == rolls


@pytest.mark.parametrize(("text", "mib"), [("64Mi", 64), ("100M", 95), ("1Gi", 1024), ("0", 0), ("1.5Mi", 1)])
def test_sizes_in_whole_mib_are_rounded_down(text: str, mib: int) -> None:
    assert whole_mib(text) == mib


@pytest.mark.parametrize(("text", "gb"), [("64G", 64), ("64Gi", 68), ("1999M", 1), ("1Ti", 1099)])
def test_sizes_in_whole_gb_are_rounded_down(text: str, gb: int) -> None:
    assert whole_gb(text) == gb


def test_a_group_of_pods_names_its_first_one_and_a_single_pod_names_nobody() -> None:
    spec = spec_of(engine=SGLANG, prefill__nodesPerReplica=4, prefill__tensorParallelSize=32)
    _, args = engine_command(spec, Role.PREFILL, spec.prefill, NodePlace(3, "a-prefill-0-0.a-pods"))
    at = args.index("--nnodes")
    assert args[at : at + 6] == ["--nnodes", "4", "--node-rank", "3", "--dist-init-addr", "a-prefill-0-0.a-pods:20000"]
    _, single = engine_command(spec, Role.DECODE, spec.decode, NodePlace(0, "a-decode-0-0.a-pods"))
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(single)


def test_facts_are_those_of_the_composed_line_and_environment() -> None:
    spec = spec_of(
        engine=SGLANG,
        transfer={"backend": "Mooncake", "fabric": {"type": "TCP"}},
        prefill__extraArgs=["--chunked-prefill-size", "8192", "--dsa-prefill-backend=trtllm", "--dcp-size", "2"],
        decode__extraArgs=["--speculative-algo", "EAGLE3", "--dsa-decode-backend", "flashmla_kv", "--device", "cpu"],
        decode__env=[{"name": "SGLANG_DISAGG_STAGING_BUFFER", "value": "1"}],
        decode__hostKV={"mode": "HostReceive", "size": "64G"},
        decode__resources={"limits": {"memory": "128Gi"}},
    )
    prefill, decode = spec_facts(spec)
    assert prefill.mooncake_tcp and decode.mooncake_tcp
    assert (prefill.chunked_prefill_size, prefill.dsa_backend, prefill.dcp_size) == (8192, "trtllm", 2)
    assert (decode.speculative_algorithm, decode.dsa_backend, decode.dcp_size) == ("EAGLE3", "flashmla_kv", 1)
    assert (prefill.staging_buffer, decode.staging_buffer) == (False, True)
    assert decode.host_kv is HostKVMode.HOST_RECEIVE and decode.host_receive_threshold == 0
    assert decode.hicache_size == 64 and decode.host_memory == 128 * 2**30
    assert decode.accelerator is Accelerator.CPU and prefill.accelerator is None
    assert prefill.host == "0.0.0.0" and prefill.rank_host == "$(POD_IP)"


def test_the_gpu_is_known_as_far_as_node_selector_and_resources_tell() -> None:
    labels = {"nvidia.com/gpu.compute.major": "10", "nvidia.com/gpu.compute.minor": "0"}
    nvidia, amd = {"limits": {"nvidia.com/gpu": 8}}, {"limits": {"amd.com/gpu": 8, "memory": "1Ti"}}
    assert accelerator(spec_of(prefill__template={"nodeSelector": labels}).prefill) is Accelerator.SM100
    assert accelerator(spec_of(prefill__resources=nvidia).prefill) is Accelerator.NVIDIA
    assert accelerator(spec_of(prefill__resources=amd).prefill) is Accelerator.ROCM
    assert accelerator(spec_of(prefill__template={"nodeSelector": {"gpu": "b200"}}).prefill) is None


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("lmsysorg/sglang:v0.5.23", "0.5.23"),
        ("lmsysorg/sglang:v0.5.23-cu129", "0.5.23"),
        ("registry.local:5000/sglang:0.5.23.post1-runtime@sha256:00ff", "0.5.23.post1"),
        ("lmsysorg/sglang:latest", None),
        ("lmsysorg/sglang:dev-0.5.23", None),
        ("registry.local:5000/sglang", None),
    ],
)
def test_the_engines_version_is_read_from_its_images_tag(image: str, version: str | None) -> None:
    assert engine_version(spec_of(engine={"type": "SGLang", "image": image})) == version
    assert engine_version(spec_of(engine={"type": "SGLang", "image": image, "version": "v1.2.3"})) == "1.2.3"
