"""What an engine refuses, passes over, or can not have, as far as one spec tells."""

from __future__ import annotations

from pdoperator.api.spec import HostKVSpec, PDClusterSpec, RoleSpec, TransferSpec
from pdoperator.domain.engine_command import GB, own_args, whole_gb
from pdoperator.domain.engine_flags import owned_flag
from pdoperator.domain.facts import engine_version, memory_limit
from pdoperator.domain.finding import Finding, fail, warn
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.contract.sglang_cli import BY_DEST, READ_FROM, Flags, has_reference, hidden_fact, is_read, read_flags

_NOT_HTTP = ("grpc_mode", "smg_grpc_mode", "ssl_certfile", "ssl_keyfile")
HOST_RESERVE = 10 << 30
"""Bytes of host memory that SGLang leaves free beside its host pools."""


def engine_findings(spec: PDClusterSpec) -> list[Finding]:
    """Findings about the spec's engine."""
    if spec.engine.type is EngineType.REFERENCE:
        return [*_not_of_reference(spec), *_without_our_backend(spec)]
    found = []
    if spec.model.served_name and ":" in spec.model.served_name:
        found.append(
            fail(
                "ServedName",
                f"spec.model.servedName is {spec.model.served_name!r}: SGLang keeps ':' for LoRA adapters and does not "
                "start",
                "Choose a name without ':'.",
            )
        )
    for role in Role:
        found += _flags(spec, role)
        found += _host_memory(role_spec(spec, role), spec.decode.host_kv if role is Role.DECODE else None, role)
    # What both roles say alike is said once.
    return [*dict.fromkeys(found), *_without_our_backend(spec)]


def _flags(spec: PDClusterSpec, role: Role) -> list[Finding]:
    """What SGLang's parser makes of the spec's fields and of extraArgs: values it does not take, mistakes, and flags
    that a field has set already, where the later one would win without a word."""
    side = role_spec(spec, role)
    where = f"spec.{role.value}.extraArgs"
    only_in_the_pod = [a for a in side.extra_args if has_reference(a)]
    ours, theirs = read_flags(own_args(spec, role, side)), read_flags(side.extra_args, only_in_the_pod)
    found = [_value_refused(problem) for problem in ours.problems]
    found += [*_not_served(theirs, where), *_not_seen(theirs, role, where)]
    for problem in theirs.problems:
        name = problem.partition(":")[0]
        if owned_flag(name) is not None:
            continue  # It is refused anyway.
        stray = next((a for a in only_in_the_pod if repr(a) in problem), None)
        if stray is not None:
            message = f"{where}: only the pod knows what {stray} is: a flag in it is not checked"
            found.append(warn("PodVariable", message, "Write flags and values as they are."))
            continue
        if name in theirs.unknown and engine_version(spec) != READ_FROM:
            action = f"Correct the flag, or leave it if the engine in {spec.engine.image} has it."
            found.append(warn("EngineFlag", f"{where}: {problem}; another version may have it", action))
        else:
            found.append(fail("EngineFlag", f"{where}: {problem}. SGLang refuses to start", "Correct the flag."))
    for dest, value in theirs.values.items():
        name = BY_DEST[dest].name
        if dest in ours.values and ours.values[dest] != value and owned_flag(name) is None:
            message = f"{where} sets {name} to {value!r}, and a field of the spec sets it to {ours.values[dest]!r}"
            found.append(fail("SetTwice", message, "Set it in one place."))
    return found


def _not_served(theirs: Flags, where: str) -> list[Finding]:
    """Flags with which a pod never gets ready."""
    found = []
    if theirs.given("help"):
        found.append(fail("EngineFlag", f"{where}: with --help SGLang prints its help and ends", "Remove it."))
    for dest in _NOT_HTTP:
        if theirs.given(dest) and theirs.values.get(dest) is not False:
            message = (
                f"{where}: with {BY_DEST[dest].name} the engine does not serve plain HTTP, which probes, operator "
            )
            found.append(fail("EngineFlag", message + "and router speak", "Remove it."))
    return found


def _not_seen(theirs: Flags, role: Role, where: str) -> list[Finding]:
    """Settings that a rule decides on, with a value that Kubernetes fills in."""
    return [
        warn(
            "PodVariable",
            f"{where}: only the pod knows the value of {BY_DEST[dest].name}: it is checked as if it were not given",
            "Write the value as it is.",
        )
        for dest in theirs.hidden
        if is_read(dest) and not hidden_fact(role, dest)
    ]


def _value_refused(problem: str) -> Finding:
    """A field's value that SGLang's parser does not take."""
    flag = owned_flag(problem.partition(":")[0])
    field = flag.instead if flag is not None and flag.instead else "the spec"
    return fail("EngineFlag", f"{field}: {problem}. SGLang refuses to start", "Choose a value that the engine has.")


def _host_memory(side: RoleSpec, host: HostKVSpec | None, role: Role) -> list[Finding]:
    """The host pools of all ranks of a pod, and what SGLang leaves free, against the container's limit."""
    limit = memory_limit(side)
    cache = side.hierarchical_cache
    each = cache.size * GB if cache is not None and cache.size else 0
    field = f"spec.{role.value}.hierarchicalCache.size"
    if host is not None and host.size is not None:
        each, field = whole_gb(host.size) * GB, "spec.decode.hostKV.size"
    ranks = max(1, side.tensor_parallel_size * side.pipeline_parallel_size // side.nodes_per_replica)
    if limit is None or not each or each * ranks + HOST_RESERVE <= limit:
        return []
    return [
        fail(
            "HostMemory",
            f"{field} is {each / GB:.0f} GB for each of {ranks} ranks of a pod, and SGLang keeps 10 GiB free beside "
            f"that: {(each * ranks + HOST_RESERVE) / GB:.1f} GB, but the container's memory limit is "
            f"{limit / GB:.1f} GB",
            f"Raise spec.{role.value}.resources.limits.memory, or lower {field}.",
        )
    ]


def _not_of_reference(spec: PDClusterSpec) -> list[Finding]:
    """What the Reference engine would pass over without a word."""
    told = [f"spec.{role.value}.hierarchicalCache" for role in Role if role_spec(spec, role).hierarchical_cache]
    decode = spec.decode
    host = decode.host_kv
    told += _set(
        ("spec.decode.radixCache", decode.radix_cache),
        ("spec.decode.retractionBackup", decode.retraction_backup is not None),
        ("spec.decode.hostKV.size", host.size is not None),
        ("spec.decode.hostKV.ratio", host.ratio is not None),
        ("spec.decode.hostKV.threshold", host.threshold is not None),
        ("spec.decode.hostKV.hiSparse", host.hi_sparse is not None and host.mode is HostKVMode.HISPARSE),
    )
    found = [
        fail(
            "ReferenceSetting",
            f"{field} is set, but the Reference engine does not have it",
            f"Remove {field}, or use the SGLang engine.",
        )
        for field in told
    ]
    for role in Role:
        side = role_spec(spec, role)
        for name, value in (
            ("pipelineParallelSize", side.pipeline_parallel_size),
            ("attentionDataParallelSize", side.attention_data_parallel_size),
        ):
            if value > 1:
                field = f"spec.{role.value}.{name}"
                found.append(
                    fail(
                        "ReferenceParallelism",
                        f"{field} is {value}, but the Reference engine splits by tensor only",
                        f"Set {field} to 1, or use the SGLang engine.",
                    )
                )
    return found


def _without_our_backend(spec: PDClusterSpec) -> list[Finding]:
    """Settings of this project's transfer module where another one moves the KV."""
    if spec.transfer.backend is Backend.PDCLUSTER:
        return []
    transfer, plain = spec.transfer, TransferSpec()
    told = _set(
        ("strategy", transfer.strategy is not plain.strategy),
        ("digest", transfer.digest),
        ("stagingSize", transfer.staging_size is not None),
        ("quarantineSize", transfer.quarantine_size is not None),
    )
    return [
        fail(
            "TransferSetting",
            f"spec.transfer.{field} is set, but it is a setting of backend PDCluster and the backend is "
            f"{transfer.backend.value}",
            f"Remove spec.transfer.{field}, or set spec.transfer.backend to PDCluster.",
        )
        for field in told
    ]


def _set(*fields: tuple[str, bool]) -> list[str]:
    return [name for name, is_set in fields if is_set]
