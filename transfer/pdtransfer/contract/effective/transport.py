"""Transfer backend, NIXL's parameters, load balancing and the bootstrap port (rules H6, H9, H13, H14).

Formulas: sglang.srt.arg_groups.pd_disaggregation_hook, arg_groups.serving_hook.handle_load_balance_method,
disaggregation.nixl.conn (agent's setup).
"""

from __future__ import annotations

import json

from pdtransfer.contract.base import Backend
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.nixl_params import parse_nixl_params

_PD = "arg_groups/pd_disaggregation_hook.py"
THREADS = "8"
THREAD_PARAMETER = {"UCX": "num_threads", "OBJ": "num_threads", "GDS_MT": "thread_count", "UCCL": "num_cpus"}
DEFAULT_BOOTSTRAP_PORT = 8998


def mooncake_tcp(d: Draft) -> None:
    """Mooncake over TCP picks no RDMA device."""
    if d.now.mooncake_tcp and d.now.ib_device:
        why = "mooncake_tcp is Mooncake with MC_FORCE_TCP=1, without RDMA devices"
        d.set("H13", "ib_device", "", why, f"{_PD} handle_pd_disaggregation")


def load_balance(d: Draft) -> None:
    """`auto`: prefill follows the room, decode takes turns."""
    if d.now.load_balance_method == "auto":
        chosen = "follow_bootstrap_room" if d.prefill else "round_robin"
        source = "arg_groups/serving_hook.py handle_load_balance_method"
        d.set("H9", "load_balance_method", chosen, f"auto on {d.asked.role.value}", source)


def bootstrap_port(d: Draft) -> None:
    """SGLang's Rust server answers bootstrap requests on the API port. A backend with a bootstrap server of
    its own, as PDCluster's, keeps its port."""
    now = d.now
    if not d.prefill or not now.rust_server or now.backend is Backend.PDCLUSTER or now.port is None:
        return
    if now.bootstrap_port == DEFAULT_BOOTSTRAP_PORT:
        why = "the Rust server serves it on the API port"
        d.set("H6", "bootstrap_port", now.port, why, f"{_PD} _alias_bootstrap_port_to_api_port")


def nixl_threads(d: Draft) -> None:
    """Stock NIXL on prefill adds eight threads."""
    now = d.now
    if not d.prefill or now.backend is not Backend.NIXL or now.nixl_backend is None or now.nixl_params is None:
        return
    name = THREAD_PARAMETER.get(now.nixl_backend)
    parameters, problem = parse_nixl_params(now.nixl_params)
    if name is None or problem or name in parameters:
        return
    text = json.dumps(parameters | {name: THREADS})
    d.set("H14", "nixl_params", text, "prefill's transfer threads", "disaggregation/nixl/conn.py", adds=True)
