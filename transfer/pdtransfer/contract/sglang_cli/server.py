"""Facts of a running server from what it says about itself: /server_info, and its bootstrap server's /route."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.sglang_cli.facts import (
    BACKENDS,
    ReadFacts,
    memory_kinds,
    named_role,
    settings_facts,
    validated,
)
from pdtransfer.contract.sglang_cli.flags import BY_DEST, is_read
from pdtransfer.contract.sglang_cli.kinds import Kind

_TYPES: Mapping[Kind, tuple[type, ...]] = {
    Kind.SWITCH: (bool,),
    Kind.TEXT: (str,),
    Kind.INT: (int,),
    Kind.TOKENS: (int,),
    Kind.FLOAT: (int, float),
}


class NoServerInfo(ValueError):
    """The answer is not one of /server_info; the message names the field."""


def server_facts(
    info: Any, *, geometry: ModelGeometry | None = None, route_registered: bool | None = None
) -> ReadFacts:
    """Facts of a server from the body of /server_info, of SGLang or of Reference. Its role is the one it names.

    The values are effective ones: SGLang has made its own choices already. The environment does not show, so
    what only it tells stays unknown. Raises NoServerInfo for an answer that names no role or has a field of
    the wrong type."""
    if not isinstance(info, Mapping):
        raise NoServerInfo(f"it is no JSON object but {type(info).__name__}")
    mode = info.get("disaggregation_mode")
    if not isinstance(mode, str):
        raise NoServerInfo("it has no disaggregation_mode, so it is neither SGLang nor Reference")
    role = named_role(info)
    if role is None:
        raise NoServerInfo(f"its disaggregation_mode is {mode!r}: it is no part of a P/D pair")
    # Of what no rule reads, some is no plain value (cuda_graph_config).
    settings = {dest: _checked(dest, info[dest]) for dest in BY_DEST if dest in info and is_read(dest)}
    engine = EngineType.REFERENCE if info.get("engine") == EngineType.REFERENCE.value else EngineType.SGLANG
    told = settings_facts(role, settings)
    backend = settings.get("disaggregation_transfer_backend")
    problems = []
    if backend not in BACKENDS:
        problems.append(f"no rule knows the transfer backend {backend!r}; it is checked as Mooncake, SGLang's default")
        told["backend"] = Backend.MOONCAKE
    told |= {
        "engine": engine,
        "engine_version": _optional(info, "version", str),
        "observed": True,
        "resolved": engine is EngineType.SGLANG,
        "geometry": geometry,
        "max_total_tokens": _optional(info, "max_total_num_tokens", int),
        "route_registered": route_registered,
    }
    if engine is EngineType.SGLANG:
        told["memory_kinds"] = memory_kinds(role, told.get("host_kv", HostKVMode.OFF))
    else:
        told["memory_kinds"] = frozenset(_kinds(info))
    facts, refused = validated(role, told)
    if refused:
        raise NoServerInfo(f"its {refused[0]}")
    return ReadFacts(facts, role, tuple(problems))


def card_facts(role: Role, settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Facts of the resolved settings on a rank's card, by attribute of RoleFacts. A setting that is not known here,
    or is of a wrong type, is not told."""
    good: dict[str, Any] = {}
    for dest, value in settings:
        if dest in BY_DEST:
            with contextlib.suppress(NoServerInfo):
                good[dest] = _checked(dest, value)
    told = settings_facts(role, good)
    facts, _ = validated(role, told)
    return {name: getattr(facts, name) for name in told}


def _checked(dest: str, value: Any) -> Any:
    """A setting of the type that its flag has."""
    types = _TYPES.get(BY_DEST[dest].kind)
    if value is None or types is None:
        return value
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise NoServerInfo(f"its {dest} is {value!r}, not a {BY_DEST[dest].kind.value}")
    return value


def _optional(info: Mapping[str, Any], name: str, kind: type) -> Any:
    value = info.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise NoServerInfo(f"its {name} is {value!r}")
    return value


def _kinds(info: Mapping[str, Any]) -> list[str]:
    value = info.get("kv_memory_kinds")
    if not isinstance(value, list) or not all(v in ("VRAM", "DRAM") for v in value):
        raise NoServerInfo(f"its kv_memory_kinds are {value!r}")
    return value


class PrefillRoute(BaseModel):
    """What a prefill's bootstrap server tells every decode (GET /route with four -1). Sizes are counts of ranks."""

    model_config = ConfigDict(extra="ignore", strict=True)

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None
    kv_cache_dtype: str | None
    follow_bootstrap_room: bool
    kv_layout: str | None = None
    decode_allocation_policy: str = "early"
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None


def prefill_route(body: Any) -> PrefillRoute:
    """Raises NoServerInfo naming the first field that is missing or of the wrong type."""
    try:
        return PrefillRoute.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "the answer"
        raise NoServerInfo(f"{where}: {first['msg']}") from None


def route_contradictions(route: PrefillRoute, facts: RoleFacts) -> tuple[str, ...]:
    """Where prefill's bootstrap server tells decode otherwise than the server tells about itself: it is another
    server's, or its ranks are."""
    dp = facts.attention_dp if facts.attention_dp > 1 else facts.replicas_inside
    pairs: tuple[tuple[str, object, object], ...] = (
        ("attention TP", route.attn_tp_size, facts.attention_tp),
        ("context parallelism", route.attn_cp_size, facts.context_parallel),
        ("data parallelism", route.dp_size, dp),
        ("pipeline parallelism", route.pp_size, facts.pipeline_parallel),
        ("page size", route.page_size, facts.page_size),
        ("KV dtype", route.kv_cache_dtype, facts.kv_dtype),
        ("port", route.prefill_http_port, facts.port),
    )
    return tuple(
        f"its bootstrap server says {name} {theirs}, the server itself {ours}"
        for name, theirs, ours in pairs
        if theirs is not None and ours is not None and theirs != ours
    )
