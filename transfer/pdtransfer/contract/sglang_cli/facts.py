"""Facts of a role from SGLang's settings: those of a command line and its environment, or those of a running server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, MemoryKind, Role
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.sglang_cli.flags import BY_DEST, FLAGS, PLACEMENT, is_read
from pdtransfer.contract.sglang_cli.parser import Flags

BACKENDS: Mapping[str, Backend] = {
    "pdcluster": Backend.PDCLUSTER,
    "nixl": Backend.NIXL,
    "mooncake": Backend.MOONCAKE,
    "mooncake_tcp": Backend.MOONCAKE,
}
"""SGLang's names of the transfer backends that the rules know."""

_DSA = {Role.PREFILL: "dsa_prefill_backend", Role.DECODE: "dsa_decode_backend"}
_TRUE, _FALSE = frozenset({"true", "1", "yes", "y"}), frozenset({"false", "0", "no", "n"})


def _switch(text: str) -> bool:
    """A boolean variable as SGLang reads it. Raises ValueError for what SGLang takes no notice of."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("neither true nor false")


ENVIRONMENT: Mapping[str, tuple[str, type[str] | type[int] | type[bool]]] = {
    "SGLANG_DISAGG_STAGING_BUFFER": ("staging_buffer", bool),
    "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": ("staging_pool_mb", int),
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": ("all_cp_ranks_transfer", bool),
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": ("sampling_mask", bool),
    "SGLANG_DISAGGREGATION_NIXL_BACKEND": ("nixl_backend", str),
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": ("nixl_params", str),
    "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": ("force_query_prefill_dp_rank", bool),
    "SGLANG_DISAGGREGATION_QUEUE_SIZE": ("transfer_queues", int),
    "SGLANG_RUST_SERVER": ("rust_server", bool),
    "SGLANG_USE_HND_KVCACHE": ("hnd_kv_cache", bool),
    "SGLANG_DSV4_KV_LAYOUT": ("dsv4_kv_layout", str),
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT": ("dsv4_compressed_kv_layout", str),
    "SGLANG_MINICPM_FORCE_DENSE": ("minicpm_force_dense", bool),
    "SGLANG_USE_AITER_UNIFIED_ATTN": ("aiter_unified_attention", bool),
    "SGLANG_AITER_KV_CACHE_LAYOUT": ("aiter_kv_layout", str),
    "UCX_NET_DEVICES": ("ucx_net_devices", str),
    "PDTRANSFER_NET_DEVICES": ("net_devices", str),
    "MC_FORCE_TCP": ("mc_force_tcp", str),
    "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": ("one_visible_device", bool),
}
"""Variables that the rules read: fact and type."""

VARIABLE_OF: Mapping[str, str] = {fact: name for name, (fact, _) in ENVIRONMENT.items()} | {
    "rank_host": "SGLANG_HOST_IP"
}
"""The variable that alone tells a fact."""

_SECOND_TO_FLAG: Mapping[str, tuple[str, str, type[str] | type[int]]] = {
    # variable -> (fact, the setting that goes before it, type)
    "SGLANG_MAMBA_SSM_DTYPE": ("ssm_dtype", "mamba_ssm_dtype", str),
}
_FIRST_TO_FLAG: Mapping[str, tuple[str, type[int]]] = {
    "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS": ("sampling_mask_max_tokens", int),
}


@dataclass(frozen=True)
class ReadFacts:
    """Facts of a role; `problems` say what of the input could not be used, `role` is the one the input names,
    `impossible` are values that no engine can have."""

    facts: RoleFacts
    role: Role | None
    problems: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()


def given_facts(role: Role, flags: Flags) -> dict[str, Any]:
    """Facts that these flags state, by attribute of RoleFacts. What is not given is left out."""
    return settings_facts(role, flags.values)


def settings_facts(role: Role, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of these settings, by attribute of RoleFacts. A setting that is null says what `Flag.unset` says."""
    facts: dict[str, Any] = {}
    for flag in FLAGS:
        if not flag.fact or flag.dest not in settings:
            continue
        value = settings[flag.dest]
        if value is None:
            value = flag.unset
        if value is not None:
            facts[flag.fact] = value
    if settings.get(_DSA[role]) is not None:
        facts["dsa_backend"] = settings[_DSA[role]]
    backend = settings.get("disaggregation_transfer_backend")
    if isinstance(backend, str) and backend in BACKENDS:
        facts["backend"] = BACKENDS[backend]
        if backend == "mooncake_tcp":
            facts["mooncake_tcp"] = True
    if "enable_hisparse" in settings or "disaggregation_decode_host_receive_threshold" in settings:
        facts["host_kv"] = _host_kv(settings)
    if settings.get("device") == "cpu":
        facts["accelerator"] = Accelerator.CPU
    return facts


def told_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, str | int | float | bool | None], ...]:
    """Of a running server's resolved settings (by SGLang's names) those that some rule reads, in order of their
    names, for its card. What is no plain value is left out."""
    return tuple(
        (dest, settings[dest])
        for dest in sorted(BY_DEST)
        if dest in settings and is_read(dest) and isinstance(settings[dest], str | int | float | bool | None)
    )


def _host_kv(settings: Mapping[str, Any]) -> HostKVMode:
    if settings.get("enable_hisparse"):
        return HostKVMode.HISPARSE
    threshold = settings.get("disaggregation_decode_host_receive_threshold")
    return HostKVMode.HOST_RECEIVE if threshold is not None and threshold < 1 else HostKVMode.OFF


def memory_kinds(role: Role, host_kv: HostKVMode) -> frozenset[MemoryKind] | None:
    """Where SGLang registers the KV pool, if that is certain (rule F1: prefill's is always device memory)."""
    if role is Role.PREFILL or host_kv is HostKVMode.OFF:
        return frozenset({MemoryKind.VRAM})
    return None


def environment_facts(environment: Mapping[str, str], settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(facts, problems) of the variables that the rules read. SGLang warns of a value of the wrong type and takes
    its default; that is a problem here, and the fact is left out."""
    facts: dict[str, Any] = {}
    problems: list[str] = []

    def take(name: str, fact: str, kind: type) -> None:
        if name not in environment:
            return
        text = environment[name]
        try:
            facts[fact] = _switch(text) if kind is bool else kind(text)
        except ValueError:
            what = "true or false" if kind is bool else "a whole number"
            problems.append(f"{name}={text} has no effect: SGLang needs {what} there and takes its default")

    for name, (fact, kind) in ENVIRONMENT.items():
        take(name, fact, kind)
    for name, (fact, setting, kind) in _SECOND_TO_FLAG.items():
        if settings.get(setting) is None:
            take(name, fact, kind)
    for name, (fact, kind) in _FIRST_TO_FLAG.items():
        take(name, fact, kind)
    host = environment.get("SGLANG_HOST_IP") or environment.get("HOST_IP")
    if host:
        facts["rank_host"] = host
    return facts, problems


def named_role(settings: Mapping[str, Any]) -> Role | None:
    """The role that --disaggregation-mode names."""
    mode = settings.get("disaggregation_mode")
    return Role(mode) if mode in (Role.PREFILL.value, Role.DECODE.value) else None


def command_facts(
    role: Role,
    flags: Flags,
    environment: Mapping[str, str],
    *,
    unknown: Collection[str] = (),
    geometry: ModelGeometry | None = None,
    engine_version: str | None = None,
    accelerator: Accelerator | None = None,
) -> ReadFacts:
    """Facts of a whole command line: what is not given has SGLang's default. `role` is the one to check it for.

    `unknown` are settings and variables that are given, with a value that nobody knows here."""
    told = given_facts(role, flags)
    found, problems = environment_facts(environment, flags.values)
    told |= found
    backend = flags.get("disaggregation_transfer_backend")
    if backend not in BACKENDS:
        problems.append(f"no rule knows the transfer backend {backend!r}; it is checked as Mooncake, SGLang's default")
    told.setdefault("backend", Backend.MOONCAKE)
    for name, value in (("engine_version", engine_version), ("accelerator", accelerator), ("geometry", geometry)):
        if value is not None:
            told[name] = value
    # SGLang's own defaults are texts that the two sides compare.
    told.setdefault("kv_dtype", "auto")
    told.setdefault("model_dtype", "auto")
    told["memory_kinds"] = memory_kinds(role, told.get("host_kv", HostKVMode.OFF))
    blank = {name: None for name in (hidden_fact(role, n) for n in unknown) if name}
    facts, refused = validated(role, {k: v for k, v in told.items() if k not in blank})
    facts = facts.with_launch_defaults()
    if blank:
        # What is given and not known must not be read as not given.
        facts = facts.model_copy(update={**blank, "whole_command": False})
    places = {BY_DEST[dest].fact: None for dest in PLACEMENT & set(flags.hidden)}
    if places:
        facts = facts.model_copy(update=places)
    return ReadFacts(facts, named_role(flags.values), tuple(problems), tuple(refused))


def hidden_fact(role: Role, name: str) -> str:
    """The fact that can stay unknown where the value of this setting or variable is; '' where there is none."""
    if name in PLACEMENT:
        return ""
    if name == _DSA[role]:
        return "dsa_backend"
    fact = BY_DEST[name].fact if name in BY_DEST else ENVIRONMENT.get(name, ("", str))[0]
    return fact if fact and RoleFacts.model_fields[fact].default is None else ""


def validated(role: Role, told: Mapping[str, Any]) -> tuple[RoleFacts, list[str]]:
    """Facts, without those that no engine could have (such as a size of 0), which are named."""
    try:
        return RoleFacts(role=role, **told), []
    except ValueError as error:
        bad = [str(e["loc"][0]) for e in error.errors()] if hasattr(error, "errors") else []
        if not bad:
            raise
        problems = [f"{name.replace('_', ' ')} can not be {told.get(name)!r}" for name in bad]
        return RoleFacts(role=role, **{k: v for k, v in told.items() if k not in bad}), problems
