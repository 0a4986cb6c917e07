"""Which engine flags tell facts about fit, and how they are read from a command line.

Names and aliases are those of SGLang 0.5.23; tests/sglang holds them to its own parser. Flags that are not listed
are passed over: no fit rule reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdoperator.api.quantities import parse_quantity

_FLAG = re.compile(r"(--?)([A-Za-z][^=\s]*)")


def flag_name(arg: str) -> str | None:
    """Name part of an argument with dashes for underscores; None when it is a value."""
    found = _FLAG.match(arg.strip())
    return found[1] + found[2].replace("_", "-") if found else None


# Facts: flag -> (attribute of RoleFacts, or '' when only a message needs it; type).
FACT_FLAGS: dict[str, tuple[str, type]] = {
    "--attention-backend": ("attention_backend", str),
    "--attn-cp-size": ("context_parallel", int),
    "--chunked-prefill-size": ("chunked_prefill_size", int),
    "--context-length": ("context_length", int),
    "--dcp-size": ("dcp_size", int),
    "--decode-attention-backend": ("decode_attention_backend", str),
    "--disable-priority-preemption": ("disable_priority_preemption", bool),
    "--disable-radix-cache": ("disable_radix_cache", bool),
    "--disaggregation-decode-enable-offload-kvcache": ("decode_offload", bool),
    "--disaggregation-decode-enable-radix-cache": ("decode_radix_cache", bool),
    "--disaggregation-decode-extra-slots": ("decode_extra_slots", int),
    "--disaggregation-decode-host-receive-threshold": ("host_receive_threshold", float),
    "--disaggregation-decode-retraction-backup": ("retraction_backup", str),
    "--disaggregation-enable-kv-checksum": ("kv_checksum", bool),
    "--disaggregation-ib-device": ("ib_device", str),
    "--dp-size": ("data_parallel", int),
    "--dsa-decode-backend": ("dsa_decode_backend", str),
    "--dsa-prefill-backend": ("dsa_prefill_backend", str),
    "--dtype": ("model_dtype", str),
    "--enable-dp-attention": ("dp_attention_flag", bool),
    "--enable-hierarchical-cache": ("hierarchical_cache", bool),
    "--enable-hisparse": ("", bool),
    "--enable-mixed-chunk": ("mixed_chunk", bool),
    "--enable-pd-role-switch": ("", bool),
    "--enable-priority-scheduling": ("priority_scheduling", bool),
    "--enable-unified-memory": ("unified_memory", bool),
    "--hicache-host-memory-fraction": ("hicache_host_memory_fraction", float),
    "--hicache-host-memory-mode": ("hicache_host_memory_mode", str),
    "--hicache-io-backend": ("hicache_io_backend", str),
    "--hicache-mem-layout": ("hicache_mem_layout", str),
    "--hicache-ratio": ("hicache_ratio", float),
    "--hicache-size": ("hicache_size", int),
    "--hicache-storage-backend": ("hicache_storage_backend", str),
    "--hicache-write-policy": ("hicache_write_policy", str),
    "--load-balance-method": ("load_balance_method", str),
    "--mamba-ssm-dtype": ("ssm_dtype", str),
    "--max-running-requests": ("max_running_requests", int),
    "--max-total-tokens": ("", int),
    "--optimistic-prefill-attempts": ("optimistic_prefill", int),
    "--port": ("port", int),
    "--prefill-attention-backend": ("prefill_attention_backend", str),
    "--sampling-mask-max-tokens": ("sampling_mask_max_tokens", int),
    "--speculative-adaptive": ("speculative_adaptive", bool),
    "--speculative-algorithm": ("speculative_algorithm", str),
    "--speculative-draft-model-path": ("draft_model", str),
    "--speculative-eagle-topk": ("speculative_eagle_topk", int),
}
SYNONYMS = {
    "--attention-context-parallel-size": "--attn-cp-size",
    "--data-parallel-size": "--dp-size",
    "--decode-context-parallel-size": "--dcp-size",
    "--enable-hicache": "--enable-hierarchical-cache",
    "--speculative-draft-model": "--speculative-draft-model-path",
}
"""Other official names -> the one in FACT_FLAGS."""
HUMAN_INTS = frozenset({"--context-length", "--max-total-tokens"})
"""Flags that SGLang also takes with a suffix, as Kubernetes writes quantities: 32k is 32000, 32Ki is 32768."""


@dataclass(frozen=True)
class FlagFacts:
    """What arguments say. `values` is keyed by the flag's full name without its dashes, with typed values
    (a switch that is there is True); `fields` by the attribute of RoleFacts. `problems` are flags whose
    value is missing or of the wrong type."""

    values: dict[str, object] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def canonical(name: str) -> str | None:
    """Full name of the fact flag that argparse would take `name` for; None when it is not one for sure."""
    if name in FACT_FLAGS:
        return name
    if name in SYNONYMS:
        return SYNONYMS[name]
    if not name.startswith("--"):
        return None
    names = {*FACT_FLAGS, *SYNONYMS}
    found = {SYNONYMS.get(full, full) for full in names if full.startswith(name)}
    return found.pop() if len(found) == 1 and len(name) > 6 else None


def _integer(text: str) -> int:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?[kMGT]|[0-9]+[KMGT]i", text):
        return int(parse_quantity(text))
    return int(text)


_READERS: dict[type, tuple[str, Callable[[str], object]]] = {
    int: ("an integer", int),
    float: ("a number", float),
    str: ("a value", str),
}


def _value(full: str, kind: type, raw: str) -> object:
    reader = _integer if full in HUMAN_INTS else _READERS[kind][1]
    return reader(raw)


def parse_fact_flags(args: Iterable[str]) -> FlagFacts:
    """Read the fact flags of a command line as argparse would: the last one wins, `--flag value` and
    `--flag=value`, underscores and abbreviations. Flags that are unknown here are passed over."""
    items = list(args)
    values: dict[str, object] = {}
    fields: dict[str, object] = {}
    found: list[str] = []
    for index, arg in enumerate(items):
        name = flag_name(arg)
        full = canonical(name) if name else None
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
                raw = items[index + 1] if index + 1 < len(items) and flag_name(items[index + 1]) is None else None
            if raw is None:
                found.append(f"{full} needs a value")
                continue
            try:
                value = _value(full, kind, raw)
            except ValueError:
                found.append(f"{full} needs {_READERS[kind][0]}, got {raw!r}")
                continue
        values[full.removeprefix("--")] = value
        if attribute:
            fields[attribute] = value
    return FlagFacts(values, fields, tuple(found))
