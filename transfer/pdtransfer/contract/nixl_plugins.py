"""NIXL's plugins that carry KV between ranks, and the parameters that each one reads.

From NIXL 1.5.1: what the engines of its two plugins that move memory over a network ask their parameters for. NIXL
passes over a parameter that nothing reads, and of a bad value tells no more than the class of its error. So both are
checked here, by the operator before it launches a rank and by the rank before it makes its agent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

READ_FROM = "1.5.1"
DEFAULT = "UCX"
PLUGIN_VARIABLE = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
PARAMS_VARIABLE = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
"""Variables that choose plugin and parameters. They are SGLang's own; every engine with this backend reads them too."""
PARAMETERS: Mapping[str, frozenset[str]] = {
    "UCX": frozenset(
        {
            "device_list",
            "engine_config",
            "num_threads",
            "num_workers",
            "split_batch_size",
            "ucx_error_handling_mode",
            "ucx_num_device_channels",
        }
    ),
    "LIBFABRIC": frozenset(
        {"max_bw_per_dram_seg", "num_threads", "post_queue_size", "split_batch_size", "striping_threshold"}
    ),
}
"""Plugins that backend PDCluster takes, and what each reads."""
STORAGE = frozenset({"AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX"})
"""Plugins that move memory to files, blocks or objects: no other rank's memory is reached through them."""
UNREAD = {"ucx_devices": "device_list"}
"""Parameters that a plugin lists and does not read -> the one that does what the name says."""
_TEXTS = frozenset({"device_list", "engine_config", "ucx_error_handling_mode"})
_NEEDED_MODE = "peer"
_PAIR = re.compile(r"[A-Z][A-Z0-9_]*=\S+")


def plugin_problem(name: str, parameters: Mapping[str, str], told: Iterable[str] = ()) -> str:
    """What is wrong with this plugin and these parameters for backend PDCluster, and what there is instead; '' when
    nothing is. `told` are parameters that the installed plugin itself lists beside the known ones."""
    known = PARAMETERS.get(name)
    if known is None:
        what = f"{name} moves memory to storage, not to another rank" if name in STORAGE else f"{name} is not known"
        return f"{what}; the NIXL plugins that carry KV are {_list(PARAMETERS)}"
    known = (known | frozenset(told)) - UNREAD.keys()
    for key, value in sorted(parameters.items()):
        if key not in known:
            instead = f" ({UNREAD[key]} does what its name says)" if key in UNREAD else ""
            return f"NIXL's {name} reads no parameter {key}{instead}; it reads {_list(known)}"
        problem = _value_problem(name, key, value)
        if problem:
            return f"parameter {key} of NIXL's {name} is {value!r}, {problem}"
    return ""


def unread_parameters(name: str, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """Parameters that nothing in that plugin reads; none where the plugin is not known."""
    known = PARAMETERS.get(name)
    return () if known is None else tuple(sorted(key for key in parameters if key not in known))


def engine_settings(parameters: Mapping[str, str]) -> dict[str, str]:
    """UCX's settings in `engine_config`, by their names without `UCX_`. UCX's own variables go before them."""
    pairs = (word.strip().partition("=") for word in parameters.get("engine_config", "").split(","))
    return {key: value for key, is_pair, value in pairs if is_pair}


def named_devices(parameters: Mapping[str, str]) -> str:
    """Where the parameters of UCX choose network devices: the name of the parameter, '' where none does."""
    if "device_list" in parameters:
        return "device_list"
    return "engine_config (NET_DEVICES)" if "NET_DEVICES" in engine_settings(parameters) else ""


def _value_problem(plugin: str, key: str, value: str) -> str:
    if key not in PARAMETERS[plugin]:
        return ""  # only the plugin knows
    if key == "ucx_error_handling_mode" and value != _NEEDED_MODE:
        return f"and backend PDCluster needs {_NEEDED_MODE!r}: UCX promises no word of a rank that is gone without it"
    if key == "engine_config":
        bad = next((w for w in value.split(",") if not _PAIR.fullmatch(w.strip())), None)
        return "" if bad is None else f"where {bad!r} is no NAME=value of UCX (names without UCX_, parted by commas)"
    if key not in _TEXTS and not (value.isascii() and value.isdigit()):
        return "and a whole number is needed"
    return "" if value.strip() else "and must not be empty"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
