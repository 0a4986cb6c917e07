"""What to do, in the words of SGLang's command lines: the rules speak of a PDCluster's fields, which a pair that the
operator does not run has not."""

from __future__ import annotations

import re

_OUR_BACKEND = "--disaggregation-transfer-backend pdcluster (this project's plugin)"
_PLUGIN, _PARAMETERS = "SGLANG_DISAGGREGATION_NIXL_BACKEND", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
_BACKEND_FLAG = "--disaggregation-transfer-backend"
_WORDS: dict[str, str] = {
    f"set transfer.backend once, and no {_BACKEND_FLAG} in extraArgs": f"set the same {_BACKEND_FLAG} on both roles",
    f"set transfer.plugin.name, and no {_PLUGIN} in env": f"set {_PLUGIN} alike on both roles",
    f"set spec.transfer.plugin.parameters, and no {_PARAMETERS} in env": f"correct {_PARAMETERS}",
    "correct spec.transfer.plugin, or ": "correct ",
    " and _PARAMS in env": f" and {_PARAMETERS}",
    "set spec.transfer.fabric.devices to": "set --disaggregation-ib-device to",
    ", and no --disaggregation-ib-device": "",
    "replicas (for copies)": "more servers (for copies)",
    "set hierarchicalCache to what": "set --hicache-mem-layout and --hicache-io-backend to what",
    "change hierarchicalCache as": "change the --hicache- flags as",
    "hierarchicalCache.storageBackend": "--hicache-storage-backend",
    "hierarchicalCache": "--enable-hierarchical-cache",
    "set hostKV on": "set --enable-hisparse and --disaggregation-decode-host-receive-threshold on",
    "hostKV mode Off": "neither --enable-hisparse nor --disaggregation-decode-host-receive-threshold",
    "spec.transfer.plugin.parameters": _PARAMETERS,
    "spec.transfer.plugin.name": _PLUGIN,
    "transfer.backend NIXL or Mooncake": f"{_BACKEND_FLAG} nixl or mooncake",
    "transfer.backend PDCluster": _OUR_BACKEND,
    "transfer.backend Mooncake": f"{_BACKEND_FLAG} mooncake",
    "transfer.backend NIXL": f"{_BACKEND_FLAG} nixl",
    "kvCache.dtype": "--kv-cache-dtype",
    "kvCache.pageSize": "--page-size",
    "attentionDataParallelSize": "--attn-dp-size",
    "pipelineParallelSize": "--pp-size",
    "tensorParallelSize": "--tp-size",
}
_ANY = re.compile("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True))))


def in_flags(action: str) -> str:
    """The action with SGLang's flags and variables in place of a PDCluster's fields."""
    return _ANY.sub(lambda found: _WORDS[found[0]], action)
