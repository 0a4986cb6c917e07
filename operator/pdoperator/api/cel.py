"""The CRD's CEL rules: what one PDCluster can decide about itself, refused by the API server at apply.

Declarations only; `crd` puts them into the schema, `validation` applies their Python twins to manifests that no API
server has seen; those about caches are in `cel_cache`. Rules about fit live in pdtransfer.contract.compat; the ones
repeated here carry its rule id and are tested against it.
Field access without has() relies on the schema's defaults; such rules stand at spec, which has none itself (the
API server evaluates rules on a default before it fills in the defaults below it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from pdoperator.api import names
from pdoperator.api.cel_cache import CACHE_RULES
from pdoperator.api.cel_flags import abbreviation_patterns, flag_pattern
from pdoperator.api.cel_rule import CelRule as CelRule
from pdoperator.domain.container_env import OWN_ENV
from pdoperator.domain.engine_flags import OWNED
from pdoperator.domain.template import NOTHING_BELOW

MAX_NAME = 40
"""Longest name of a PDCluster: with role, replica, revision and attempt behind it a pod's name stays a DNS label."""
_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
OWNED_DOMAIN = "pdcluster.io/"
OWNED_VOLUMES = (
    names.VOLUME_MODEL,
    names.VOLUME_SOCKET,
    names.VOLUME_TLS,
    names.VOLUME_PLUGIN,
    names.VOLUME_SHM,
)
OWNED_MOUNTS = (names.MODEL_PATH, names.SOCKET_DIR, names.TLS_DIR, names.PLUGIN_VOLUME_DIR, "/dev/shm")
_OWNED_MOUNT = f"^({'|'.join(OWNED_MOUNTS)})/?$|^({'|'.join(NOTHING_BELOW)})/"
_ODD_PATH = "^[^/]|//|/[.][.]?(/|$)"


def _list(values: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _unmatched(pattern: str) -> Callable[[Any], bool]:
    return lambda value: re.search(pattern, value) is None


def _owned_flag_rules() -> list[CelRule]:
    rules = []
    for role in ("prefill", "decode"):
        path = ("spec", role, "extraArgs", "[]")
        for flag in OWNED:
            rules.append(
                CelRule(
                    path,
                    f"!self.matches('{flag_pattern(flag)}')",
                    f"{flag.name} is set by the operator: {flag.advice}",
                    _unmatched(flag_pattern(flag)),
                )
            )
        for pattern in abbreviation_patterns():
            rules.append(
                CelRule(
                    path,
                    f"!self.matches('{pattern}')",
                    "this abbreviates a flag that the operator sets itself: write flags in full, and use the "
                    "spec's field for that one",
                    _unmatched(pattern),
                )
            )
    return rules


def _no_own_key(value: Any) -> bool:
    return not any(key.startswith(OWNED_DOMAIN) for key in value)


def _template_rules(*path: str) -> list[CelRule]:
    template = ("spec", *path, "template")
    own_key = f"self.all(k, !k.startsWith('{OWNED_DOMAIN}'))"
    return [
        CelRule((*template, "labels"), own_key, f"labels under {OWNED_DOMAIN} belong to the operator", _no_own_key),
        CelRule(
            (*template, "annotations"), own_key, f"annotations under {OWNED_DOMAIN} belong to the operator", _no_own_key
        ),
        CelRule(
            (*template, "volumes", "[]"),
            f"!(self.name in {_list(OWNED_VOLUMES)})",
            f"volume names {', '.join(OWNED_VOLUMES)} belong to the operator: choose another name",
            lambda volume: volume["name"] not in OWNED_VOLUMES,
        ),
        CelRule(
            (*template, "volumeMounts", "[]"),
            f"!self.mountPath.matches('{_OWNED_MOUNT}')",
            f"mount paths {', '.join(OWNED_MOUNTS)} belong to the operator: choose another path",
            lambda mount: re.search(_OWNED_MOUNT, mount["mountPath"]) is None,
        ),
        CelRule(
            (*template, "volumeMounts", "[]"),
            f"!self.mountPath.matches('{_ODD_PATH}')",
            "write the mount path absolute, without //, /./ or /../",
            lambda mount: re.search(_ODD_PATH, mount["mountPath"]) is None,
        ),
    ]


def _role_rules(role: str) -> list[CelRule]:
    path = ("spec", role)
    return [
        CelRule(
            (*path, "nodesPerReplica"),
            "self == 1",
            "nodesPerReplica above 1 is not supported yet: use 1, with all ranks of a replica on one node",
            lambda nodes: nodes == 1,
        ),
        CelRule(
            ("spec",),
            f"self.{role}.tensorParallelSize % self.{role}.attentionDataParallelSize == 0",
            "tensorParallelSize must be a multiple of attentionDataParallelSize (A2)",
            lambda spec: spec[role]["tensorParallelSize"] % spec[role]["attentionDataParallelSize"] == 0,
            field_path=f".{role}.attentionDataParallelSize",
            compat="A2",
        ),
        CelRule(
            (*path, "env", "[]"),
            f"!(self.name in {_list(OWN_ENV)})",
            "this variable is set by the operator: remove it",
            lambda entry: entry["name"] not in OWN_ENV,
        ),
        CelRule(
            (*path, "env", "[]"),
            "!(has(self.value) && has(self.valueFrom))",
            "set value or valueFrom, not both",
            lambda entry: not {"value", "valueFrom"} <= set(entry),
        ),
    ]


# Attention TP is tensorParallelSize / attentionDataParallelSize, unless extraArgs bring context parallelism in.
_P = "(self.prefill.tensorParallelSize / self.prefill.attentionDataParallelSize)"
_D = "(self.decode.tensorParallelSize / self.decode.attentionDataParallelSize)"
_OTHER_PARALLELISM = " || ".join(
    f"(has(self.{role}.extraArgs) && self.{role}.extraArgs.exists(a, a.matches('^--att')))"
    for role in ("prefill", "decode")
)


def _divisible(prefill: Any, decode: Any) -> bool:
    if any(arg.startswith("--att") for role in (prefill, decode) for arg in role.get("extraArgs", ())):
        return True
    p, d = (role["tensorParallelSize"] // role["attentionDataParallelSize"] for role in (prefill, decode))
    return bool(p == 0 or d == 0 or p % d == 0 or d % p == 0)


def _reaches_nics(fabric: Any) -> bool:
    ways = (fabric["hostNetwork"], fabric["privileged"], fabric.get("resourceClaimTemplate"), fabric.get("resources"))
    return fabric["type"] != "RDMA" or any(ways)


RULES: tuple[CelRule, ...] = (
    CelRule(
        (),
        f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('{_NAME_PATTERN}')",
        f"the name of a PDCluster must be a DNS label of at most {MAX_NAME} characters that begins with a letter: "
        "names of pods and Services are made from it",
        lambda whole: (
            len(whole["metadata"]["name"]) <= MAX_NAME
            and re.search(_NAME_PATTERN, whole["metadata"]["name"]) is not None
        ),
    ),
    CelRule(
        ("spec", "model"),
        "has(self.source) || has(self.volume)",
        "set model.source (a path or a hub id), model.volume (mounted at /mnt/models), or both",
        lambda model: bool({"source", "volume"} & set(model)),
    ),
    CelRule(
        ("spec", "model", "geometry"),
        "self.attention == 'GQA' || (has(self.kvLoraRank) && has(self.qkRopeHeadDim))",
        "attention MLA and DSA need kvLoraRank and qkRopeHeadDim (from the model's config.json)",
        lambda shape: shape["attention"] == "GQA" or {"kvLoraRank", "qkRopeHeadDim"} <= set(shape),
    ),
    CelRule(
        ("spec", "model", "geometry"),
        "!has(self.slidingWindowLayers) || self.slidingWindowLayers.all(l, l < self.layers)",
        "slidingWindowLayers are ids from 0 to layers - 1",
        lambda shape: all(layer < shape["layers"] for layer in shape.get("slidingWindowLayers", ())),
    ),
    CelRule(
        ("spec", "model", "geometry"),
        "!has(self.linearLayers) || self.linearLayers.all(l, l < self.layers)",
        "linearLayers are ids from 0 to layers - 1",
        lambda shape: all(layer < shape["layers"] for layer in shape.get("linearLayers", ())),
    ),
    CelRule(
        ("spec",),
        "self.transfer.fabric.type != 'RDMA' || self.transfer.fabric.hostNetwork || self.transfer.fabric.privileged"
        " || has(self.transfer.fabric.resourceClaimTemplate)"
        " || (has(self.transfer.fabric.resources) && size(self.transfer.fabric.resources) > 0)",
        "fabric RDMA needs a way to the NICs: set transfer.fabric.resources (for example rdma/hca), "
        "resourceClaimTemplate, hostNetwork or privileged, or set transfer.fabric.type to TCP",
        lambda spec: _reaches_nics(spec["transfer"]["fabric"]),
        field_path=".transfer.fabric",
    ),
    CelRule(
        ("spec",),
        "self.transfer.fabric.type == 'RDMA' || self.transfer.fabric.gpuDirect != 'Required'",
        "gpuDirect Required needs fabric type RDMA: TCP always goes through host memory",
        lambda spec: (
            spec["transfer"]["fabric"]["type"] == "RDMA" or spec["transfer"]["fabric"]["gpuDirect"] != "Required"
        ),
        field_path=".transfer.fabric",
    ),
    CelRule(
        ("spec",),
        f"{_P} == 0 || {_D} == 0 || {_P} % {_D} == 0 || {_D} % {_P} == 0 || {_OTHER_PARALLELISM}",
        "prefill's and decode's attention TP (tensorParallelSize / attentionDataParallelSize) must divide one "
        "another (A3): choose sizes where one is a multiple of the other",
        lambda spec: _divisible(spec["prefill"], spec["decode"]),
        compat="A3",
    ),
    CelRule(
        ("spec",),
        "self.decode.pipelineParallelSize in [1, self.prefill.pipelineParallelSize]",
        "decode's pipelineParallelSize must be 1 or prefill's (A8)",
        lambda spec: spec["decode"]["pipelineParallelSize"] in (1, spec["prefill"]["pipelineParallelSize"]),
        field_path=".decode.pipelineParallelSize",
        compat="A8",
    ),
    CelRule(
        ("spec",),
        "!(string(self.rollout.maxSurge) in ['0', '0%'] && string(self.rollout.maxUnavailable) in ['0', '0%'])",
        "maxSurge and maxUnavailable can't both be 0: no rollout could ever take a step",
        lambda spec: not {str(spec["rollout"][key]) for key in ("maxSurge", "maxUnavailable")} <= {"0", "0%"},
        field_path=".rollout",
    ),
    *_role_rules("prefill"),
    *_role_rules("decode"),
    *CACHE_RULES,
    *_template_rules("prefill"),
    *_template_rules("decode"),
    *_template_rules("router"),
    *_owned_flag_rules(),
)
