"""Which engine flags the operator owns, and which tell facts about fit.

The operator writes the owned flags itself (from spec fields); in extraArgs they would win or clash, so they
are refused in every spelling the engine's argparse accepts: `--flag value`, `--flag=value`, underscores for
dashes, and abbreviations (argparse takes any unambiguous prefix). A prefix of an owned flag is refused even
where it is ambiguous: argparse would refuse it as well, only later and with the pods already running.

Flags that only tell facts (chunked prefill, speculation, HiCache ...) are allowed and read for the fit check.
Names are those of SGLang 0.5.23 and of Reference, which takes some of them and a few of its own. A name that one of
them does not have is refused as well: the other engine would end with a usage error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OwnedFlag:
    """One flag in all its official names. `instead` is the spec field to use, or '' where there is none."""

    names: tuple[str, ...]
    instead: str
    why: str = ""

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]

    @property
    def advice(self) -> str:
        """What to do, as a sentence."""
        if self.instead:
            return f"use {self.instead}"
        return f"leave it out: {self.why or 'the operator sets it'}"


OWNED: tuple[OwnedFlag, ...] = (
    OwnedFlag(("--tensor-parallel-size", "--tp-size", "--tp", "-tp"), "tensorParallelSize"),
    OwnedFlag(("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"), "pipelineParallelSize"),
    OwnedFlag(
        ("--data-parallel-size", "--dp-size", "--dp", "-dp"),
        "replicas, or attentionDataParallelSize for data-parallel attention",
    ),
    OwnedFlag(
        (
            "--attn-dp-size",
            "--attn-data-parallel-size",
            "--attention-data-parallel-size",
            "--enable-dp-attention",
        ),
        "attentionDataParallelSize",
    ),
    OwnedFlag(("--page-size",), "spec.kvCache.pageSize"),
    OwnedFlag(("--kv-cache-dtype",), "spec.kvCache.dtype"),
    OwnedFlag(("--model-path", "--model"), "spec.model.source or spec.model.volume"),
    OwnedFlag(("--revision",), "spec.model.revision"),
    OwnedFlag(("--served-model-name",), "spec.model.servedName"),
    OwnedFlag(("--disaggregation-mode",), "", "it follows from the role"),
    OwnedFlag(("--disaggregation-transfer-backend",), "spec.transfer.backend"),
    OwnedFlag(("--disaggregation-ib-device", "--net-devices"), "spec.transfer.fabric.devices"),
    OwnedFlag(("--disaggregation-bootstrap-port",), "", "the operator sets it and the router relies on it"),
    OwnedFlag(("--host",), "", "engines listen on the pod's address"),
    OwnedFlag(("--port",), "", "the operator sets it and the router relies on it"),
    OwnedFlag(("--nnodes", "--node-rank"), "nodesPerReplica"),
    OwnedFlag(("--dist-init-addr", "--nccl-init-addr"), "", "the operator sets it for each replica"),
    OwnedFlag(("--enable-pd-role-switch",), "", "a pod's role is fixed, the router and peers rely on it"),
    OwnedFlag(("--kv-memory-kind",), "spec.decode.hostKV"),
    OwnedFlag(("--model-revision",), "spec.model.revision"),
    OwnedFlag(("--advertise-host",), "", "engines are reached at the pod's address"),
    OwnedFlag(("--sidecar-socket", "--peers-file", "--peers-dir", "--tls-dir"), "", "the operator wires the pods"),
    OwnedFlag(
        ("--cluster-uid", "--pod-uid", "--pod-name", "--pod-revision", "--incarnation"),
        "",
        "the operator and the engine set the pod's identity",
    ),
    OwnedFlag(("--config",), "", "flags inside a file can't be checked; write them into extraArgs"),
)

_OWNED_BY_NAME = {name: flag for flag in OWNED for name in flag.names}
_FLAG = re.compile(r"(--?)([A-Za-z][^=\s]*)")


def _flag_name(arg: str) -> str | None:
    """Name part of an argument with dashes for underscores; None when it is a value."""
    found = _FLAG.match(arg.strip())
    return found[1] + found[2].replace("_", "-") if found else None


def owned_flag(arg: str) -> OwnedFlag | None:
    """The owned flag that `arg` (one element of extraArgs) sets, in whatever spelling; None when it sets none."""
    name = _flag_name(arg)
    if name is None:
        return None
    if name in _OWNED_BY_NAME:
        return _OWNED_BY_NAME[name]
    if not name.startswith("--"):
        # argparse takes a prefix of -tp as well (-t 4); a number glued to it (-tp8) is refused to be safe.
        return next((flag for own, flag in _OWNED_BY_NAME.items() if _short(name, own)), None)
    if name in FACT_FLAGS:
        return None
    return next((flag for full, flag in _OWNED_BY_NAME.items() if full.startswith(name)), None)


def _short(name: str, own: str) -> bool:
    if own.startswith("--"):
        return False
    return own.startswith(name) or re.fullmatch(re.escape(own) + "[0-9]+", name) is not None


@dataclass(frozen=True)
class OwnedUse:
    """An owned flag found in extraArgs."""

    index: int
    argument: str
    flag: OwnedFlag

    @property
    def message(self) -> str:
        """For people: which argument, and what to do."""
        return f"{self.argument!r} sets {self.flag.name}, which the operator owns: {self.flag.advice}"


def owned_flags(args: Sequence[str]) -> list[OwnedUse]:
    """Every use of an owned flag in extraArgs, in order."""
    found = ((index, arg, owned_flag(arg)) for index, arg in enumerate(args))
    return [OwnedUse(index, arg, flag) for index, arg, flag in found if flag is not None]


# Facts: flag -> (attribute of RoleFacts, or '' when the fit rules do not read it; type).
FACT_FLAGS: dict[str, tuple[str, type]] = {
    "--chunked-prefill-size": ("chunked_prefill_size", int),
    "--context-length": ("context_length", int),
    "--dtype": ("model_dtype", str),
    "--attn-cp-size": ("context_parallel", int),
    "--dp-size": ("data_parallel", int),
    "--enable-dp-attention": ("dp_attention_flag", bool),
    "--speculative-algorithm": ("speculative_algorithm", str),
    "--disable-radix-cache": ("disable_radix_cache", bool),
    "--enable-mixed-chunk": ("mixed_chunk", bool),
    "--enable-hierarchical-cache": ("hierarchical_cache", bool),
    "--hicache-storage-backend": ("hicache_storage_backend", str),
    "--disaggregation-decode-enable-radix-cache": ("decode_radix_cache", bool),
    "--disaggregation-decode-enable-offload-kvcache": ("decode_offload", bool),
    "--disaggregation-decode-retraction-backup": ("retraction_backup", str),
    "--enable-hisparse": ("", bool),
    "--attention-backend": ("", str),
    "--prefill-attention-backend": ("", str),
    "--decode-attention-backend": ("", str),
    "--dsa-prefill-backend": ("", str),
    "--dsa-decode-backend": ("", str),
    "--disaggregation-decode-host-receive-threshold": ("", float),
    "--enable-pd-role-switch": ("", bool),
}
_SYNONYMS = {
    "--data-parallel-size": "--dp-size",
    "--dp": "--dp-size",
    "--attention-context-parallel-size": "--attn-cp-size",
    "--speculative-algo": "--speculative-algorithm",
}


@dataclass(frozen=True)
class FlagFacts:
    """What extraArgs say. `values` is keyed by the flag's full name without its dashes, with typed values
    (a switch that is there is True); `fields` by the attribute of RoleFacts. `problems` are flags whose
    value is missing or of the wrong type."""

    values: dict[str, object] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def _canonical(name: str) -> str | None:
    """Full name of the fact flag that argparse would take `name` for; None when it is not one for sure."""
    if name in FACT_FLAGS:
        return name
    if name in _SYNONYMS:
        return _SYNONYMS[name]
    if not name.startswith("--"):
        return None
    candidates = {full for full in FACT_FLAGS if full.startswith(name)}
    return candidates.pop() if len(candidates) == 1 and len(name) > 6 else None


def parse_fact_flags(args: Iterable[str]) -> FlagFacts:
    """Read the fact flags of extraArgs as argparse would: the last one wins, `--flag value` and `--flag=value`,
    underscores and abbreviations. Flags that are unknown here are passed over."""
    items = list(args)
    values: dict[str, object] = {}
    fields: dict[str, object] = {}
    found: list[str] = []
    for index, arg in enumerate(items):
        name = _flag_name(arg)
        full = _canonical(name) if name else None
        if full is None:
            continue
        attribute, kind = FACT_FLAGS[full]
        raw = arg.split("=", 1)[1] if "=" in arg else None
        if kind is bool:
            if raw is not None:
                found.append(f"{full} is a switch and takes no value, got {arg!r}")
                continue
            value: object = True
        else:
            if raw is None:
                raw = items[index + 1] if index + 1 < len(items) and _flag_name(items[index + 1]) is None else None
            if raw is None:
                found.append(f"{full} needs a value")
                continue
            try:
                value = kind(raw)
            except ValueError:
                found.append(f"{full} needs {_KIND_WORDS[kind]}, got {raw!r}")
                continue
        values[full.removeprefix("--")] = value
        if attribute:
            fields[attribute] = value
    return FlagFacts(values, fields, tuple(found))


_KIND_WORDS: dict[type, str] = {int: "an integer", float: "a number"}
