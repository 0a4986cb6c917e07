"""CEL rules about caches, host memory and the transfer module's sizes: settings that exclude or need one another.

What they repeat of SGLang's own start-up checks is refused here with the field's name, before a pod exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdoperator.api.cel_rule import CelRule
from pdoperator.api.quantities import parse_quantity


def _sized(value: Any) -> bool:
    return bool({"ratio", "size"} & set(value))


def _hierarchical_cache(role: str) -> list[CelRule]:
    path = ("spec", role, "hierarchicalCache")
    return [
        CelRule(
            path,
            "!(has(self.ratio) && has(self.size))",
            "set hierarchicalCache.ratio or .size, not both",
            lambda cache: not {"ratio", "size"} <= set(cache),
        ),
        CelRule(
            path,
            "!has(self.hostMemoryFraction) || !(has(self.ratio) || has(self.size))",
            "hierarchicalCache.hostMemoryFraction bounds the engine's own choice of a size: with ratio or size it has "
            "no effect, set one of them",
            lambda cache: "hostMemoryFraction" not in cache or not _sized(cache),
        ),
        CelRule(
            path,
            "has(self.storageBackend) || !(has(self.storageConfig) || has(self.storagePrefetchPolicy))",
            "hierarchicalCache.storageConfig and .storagePrefetchPolicy are settings of a store: set storageBackend",
            lambda cache: "storageBackend" in cache or not {"storageConfig", "storagePrefetchPolicy"} & set(cache),
        ),
        CelRule(
            path,
            "!has(self.hostMemoryMode) || self.hostMemoryMode != 'buffer_only' || has(self.storageBackend)",
            "hierarchicalCache.hostMemoryMode buffer_only keeps nothing in host memory: set storageBackend",
            lambda cache: not _buffer_only(cache) or "storageBackend" in cache,
        ),
    ]


def _buffer_only(cache: Any) -> bool:
    return bool(cache.get("hostMemoryMode") == "buffer_only")


def _size_at_least(field: str, least: str, *, or_zero: bool) -> tuple[str, Callable[[Any], bool]]:
    """CEL and Python for: the quantity `field` of the object is absent, at least `least`, or zero where that says
    'none'."""
    value = f"quantity(string(self.{field}))"
    zero = f" || {value}.compareTo(quantity('0')) == 0" if or_zero else ""
    rule = (
        f"!has(self.{field}) || ({value}.compareTo(quantity('{least}')) >= 0 "
        f"&& {value}.compareTo(quantity('1Ti')) <= 0){zero}"
    )

    def check(owner: Any) -> bool:
        if field not in owner:
            return True
        size = parse_quantity(owner[field])
        return parse_quantity(least) <= size <= parse_quantity("1Ti") or (or_zero and size == 0)

    return rule, check


def _sizes() -> list[CelRule]:
    staging, staging_check = _size_at_least("stagingSize", "1Mi", or_zero=True)
    quarantine, quarantine_check = _size_at_least("quarantineSize", "1Mi", or_zero=False)
    host, host_check = _size_at_least("size", "1G", or_zero=False)
    return [
        CelRule(
            ("spec", "transfer"),
            staging,
            "stagingSize is a size from 1Mi to 1Ti, or 0 for none",
            staging_check,
            field_path=".stagingSize",
        ),
        CelRule(
            ("spec", "transfer"),
            quarantine,
            "quarantineSize is a size from 1Mi to 1Ti",
            quarantine_check,
            field_path=".quarantineSize",
        ),
        _at_spec(
            ("decode", "hostKV"),
            CelRule(
                (), host, "hostKV.size is a size from 1G to 1Ti: the engine counts in whole GB", host_check, ".size"
            ),
        ),
    ]


def _at_spec(owner: tuple[str, ...], rule: CelRule) -> CelRule:
    """The rule about `owner`, standing at spec: the API server evaluates a rule on a default before it fills in the
    defaults below, and these read fields that have one."""

    def check(spec: Any) -> bool:
        value = spec
        for step in owner:
            value = value[step]
        return rule.check(value)

    where = "." + ".".join(owner)
    text = rule.rule.replace("self.", f"self{where}.")
    return CelRule(("spec",), text, rule.message, check, field_path=where + rule.field_path, compat=rule.compat)


def _host_kv() -> list[CelRule]:
    owner = ("decode", "hostKV")
    rules = [
        CelRule(
            (),
            "self.mode == 'HostReceive' || !(has(self.size) || has(self.threshold))",
            "hostKV.size and .threshold are settings of mode HostReceive, and hostKV.size has no effect while "
            "hostKV.mode is Off (HiSparse is sized by ratio): set the mode, or drop them",
            lambda host: host["mode"] == "HostReceive" or not {"size", "threshold"} & set(host),
        ),
        CelRule(
            (),
            "self.mode == 'HiSparse' || !has(self.hiSparse)",
            "hostKV.hiSparse has no effect unless hostKV.mode is HiSparse: set the mode, or drop it",
            lambda host: host["mode"] == "HiSparse" or "hiSparse" not in host,
        ),
        CelRule(
            (),
            "self.mode != 'Off' || !has(self.ratio)",
            "hostKV.ratio has no effect while hostKV.mode is Off: set the mode, or drop the ratio",
            lambda host: host["mode"] != "Off" or "ratio" not in host,
        ),
        CelRule(
            (),
            "!(has(self.ratio) && has(self.size))",
            "set hostKV.ratio or .size, not both",
            lambda host: not {"ratio", "size"} <= set(host),
        ),
    ]
    sizes = CelRule(
        ("spec", *owner, "hiSparse"),
        "!has(self.deviceBufferSize) || self.deviceBufferSize >= self.topK",
        "hiSparse.deviceBufferSize must be at least topK",
        lambda sizes: sizes.get("deviceBufferSize", sizes["topK"]) >= sizes["topK"],
    )
    return [*(_at_spec(owner, rule) for rule in rules), sizes]


_CACHE = "(has(self.hierarchicalCache) && self.hierarchicalCache.mode == 'Cache')"
_OFFLOAD = "(has(self.hierarchicalCache) && self.hierarchicalCache.mode == 'Offload')"


def _mode(decode: Any) -> str:
    return str(decode.get("hierarchicalCache", {}).get("mode", ""))


def _receives(decode: Any) -> bool:
    return bool(decode["hostKV"]["mode"] == "HostReceive")


def _decode() -> list[CelRule]:
    rules = [
        CelRule(
            (),
            f"self.hostKV.mode != 'HiSparse' || !(self.radixCache || {_CACHE})",
            "hostKV mode HiSparse excludes decode's radixCache and hierarchicalCache in mode Cache (E3): drop one of "
            "them",
            lambda decode: (
                decode["hostKV"]["mode"] != "HiSparse" or not (decode["radixCache"] or _mode(decode) == "Cache")
            ),
            field_path=".hostKV",
            compat="E3",
        ),
        CelRule(
            (),
            f"!{_OFFLOAD} || has(self.hierarchicalCache.storageBackend)",
            "hierarchicalCache mode Offload writes to a store (E4): set hierarchicalCache.storageBackend",
            lambda decode: _mode(decode) != "Offload" or "storageBackend" in decode["hierarchicalCache"],
            field_path=".hierarchicalCache",
            compat="E4",
        ),
        CelRule(
            (),
            f"!{_OFFLOAD} || !has(self.retractionBackup) || self.retractionBackup != 'host_pool'",
            "hierarchicalCache mode Offload and retractionBackup host_pool both build decode's host pool (E4): drop "
            "one of them",
            lambda decode: _mode(decode) != "Offload" or decode.get("retractionBackup") != "host_pool",
            field_path=".retractionBackup",
            compat="E4",
        ),
        CelRule(
            (),
            f"!{_OFFLOAD} || self.hostKV.mode != 'HostReceive'",
            "hierarchicalCache mode Offload and hostKV mode HostReceive both build decode's host pool: drop one",
            lambda decode: _mode(decode) != "Offload" or not _receives(decode),
            field_path=".hostKV",
        ),
        CelRule(
            (),
            "self.hostKV.mode != 'HostReceive' || !has(self.retractionBackup) || self.retractionBackup == 'host_pool'",
            "hostKV mode HostReceive keeps retracted requests in its host pool: leave retractionBackup out, or set "
            "host_pool",
            lambda decode: not _receives(decode) or decode.get("retractionBackup", "host_pool") == "host_pool",
            field_path=".retractionBackup",
        ),
        CelRule(
            (),
            "self.hostKV.mode != 'HostReceive' || !(has(self.hostKV.ratio) || has(self.hostKV.size))"
            " || !has(self.hierarchicalCache)"
            " || !(has(self.hierarchicalCache.ratio) || has(self.hierarchicalCache.size))",
            "hostKV mode HostReceive and hierarchicalCache share one host pool: set its size in one of the two",
            lambda decode: (
                not (_receives(decode) and _sized(decode["hostKV"]) and _sized(decode.get("hierarchicalCache", {})))
            ),
            field_path=".hostKV",
        ),
        CelRule(
            (),
            "!has(self.hierarchicalCache) || !has(self.hierarchicalCache.hostMemoryMode)"
            " || self.hierarchicalCache.hostMemoryMode != 'buffer_only'",
            "hierarchicalCache.hostMemoryMode buffer_only is for prefill: decode needs cache",
            lambda decode: not _buffer_only(decode.get("hierarchicalCache", {})),
            field_path=".hierarchicalCache",
        ),
    ]
    return [_at_spec(("decode",), rule) for rule in rules]


CACHE_RULES: tuple[CelRule, ...] = (
    *_hierarchical_cache("prefill"),
    *_hierarchical_cache("decode"),
    *_host_kv(),
    *_decode(),
    *_sizes(),
)
