"""Family H, continued: the RDMA devices that --disaggregation-ib-device names, for each rank's GPU (rule H3)."""

from __future__ import annotations

from collections.abc import Iterator

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, every, known
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.ib_devices import FILE_SUFFIX, is_map, parse_map
from pdtransfer.contract.nixl_params import parse_nixl_params
from pdtransfer.contract.nixl_plugins import PARAMS_VARIABLE as _PARAMS
from pdtransfer.contract.nixl_plugins import named_devices

H = Family()
_FLAG = "--disaggregation-ib-device"
_SHOWN = 200
"""Characters of a value that messages show."""


@H.rule(
    "H3",
    "The RDMA devices that are named can be used",
    every(Outcome.START),
    needs=(
        "ib_device",
        "net_devices",
        "nixl_backend",
        "nixl_params",
        "ucx_net_devices",
        "mc_force_tcp",
        "base_gpu_id",
        "gpu_id_step",
        "nodes",
        "one_visible_device",
        "use_ray",
    ),
    change="set spec.transfer.fabric.devices to HCA names such as mlx5_0 (with a JSON object: one entry for each GPU "
    "of a rank), and no --disaggregation-ib-device",
    engines=SGLANG_ONLY,
)
def h3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """A rank looks its own GPU up, and raises at its start where a JSON object does not have it: nothing falls back.
    PDCluster's backend reads the flag where nothing else names devices to it, and takes names with a port."""
    hits = [hit for facts in (p, d) if (hit := _devices(facts, backend))]
    return next((h for h in hits if h.outcome is not Outcome.FINE), hits[0] if hits else None)


def _devices(facts: RoleFacts, backend: Backend) -> Hit | None:
    given = known(facts.ib_device, facts, "ib_device").strip()
    if not given:
        return None
    if backend is not Backend.MOONCAKE and known(facts.nixl_backend, facts, "nixl_backend") != "UCX":
        return _unused(facts, given, f"the NIXL plugin is {facts.nixl_backend}, and only UCX reads it")
    if backend is Backend.PDCLUSTER and known(facts.net_devices, facts, "net_devices"):
        return _unused(facts, given, f"PDTRANSFER_NET_DEVICES is {facts.net_devices} and goes before it")
    if backend is Backend.NIXL and known(facts.ucx_net_devices, facts, "ucx_net_devices"):
        return _unused(facts, given, f"UCX_NET_DEVICES is {facts.ucx_net_devices} and goes before it")
    if given.endswith(FILE_SUFFIX):
        return Hit(f"{facts.role.value} reads its devices from {given} on its node", outcome=Outcome.FINE)
    table, problem = parse_map(given) if is_map(given) else ({}, "")
    lists = list(table.values()) or [given]
    problem = problem or _names_problem(lists, backend) or (_missing_gpu(facts, table, backend) if table else "")
    if problem:
        return Hit(f"{_said(facts, given)}: {problem}")
    hit = None if backend is Backend.MOONCAKE else _conflict(facts, given, lists, backend)
    if hit is None and backend is Backend.PDCLUSTER and known(facts.ucx_net_devices, facts, "ucx_net_devices"):
        return _unused(facts, given, f"UCX_NET_DEVICES is {facts.ucx_net_devices} and goes before it")
    return hit


def _names_problem(lists: list[str], backend: Backend) -> str:
    """What is wrong with the names themselves. Mooncake also looks each up in the node's sysfs at start."""
    names = [[name.strip() for name in one.split(",")] for one in lists]
    if backend is Backend.NIXL:
        bad = next((n for n in (n for group in names for n in group) if not n or ":" in n), None)
        return "" if bad is None else f"NIXL takes HCA names without a port, not {bad!r}"
    if backend is Backend.MOONCAKE and not all(any(group) for group in names):
        return "a list of it holds no name"
    return ""


def _conflict(facts: RoleFacts, given: str, lists: list[str], backend: Backend) -> Hit | None:
    """Devices that NIXL's parameters name as well: SGLang takes the same ones, PDCluster's agent none twice."""
    parameters, problem = parse_nixl_params(known(facts.nixl_params, facts, "nixl_params"))
    if problem:
        return None
    if backend is Backend.PDCLUSTER:
        where = named_devices(parameters)
    else:
        stated = parameters.get("device_list")
        same = stated is None or all(_names(one) == _names(stated) for one in lists)
        where = "" if same else f"device_list {stated}"
    if not where:
        return None
    return Hit(
        f"{_said(facts, given)}, and {_PARAMS} names {where}",
        change="name the devices in one place only",
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _missing_gpu(facts: RoleFacts, table: dict[int, str], backend: Backend) -> str:
    """The first GPU of a rank that has no entry, in words; '' where each has one or nobody can tell."""
    if backend is Backend.MOONCAKE and known(facts.mc_force_tcp, facts, "mc_force_tcp") == "1":
        return ""  # Mooncake over TCP looks no device up.
    if known(facts.use_ray, facts, "use_ray"):
        return ""  # Ray says which GPU a rank has.
    missing = next((gpu for gpu in gpu_ids(facts) if gpu not in table), None)
    if missing is None:
        return ""
    return f"it names no devices for GPU {missing}, which a rank uses (numbers are those that the process sees)"


def gpu_ids(facts: RoleFacts) -> Iterator[int]:
    """GPU number of each rank on one node; all nodes have the same ones. Of stages that share a node with a step
    above 1, numbers may come twice.
    (entrypoints/engine.py _launch_scheduler_processes, managers/data_parallel_controller.py launch_dp_schedulers,
    utils/common.py maybe_reindex_device_id)"""
    if known(facts.one_visible_device, facts, "one_visible_device") and facts.accelerator is not Accelerator.CPU:
        yield 0
        return
    base, step = known(facts.base_gpu_id, facts, "base_gpu_id"), known(facts.gpu_id_step, facts, "gpu_id_step")
    nodes = known(facts.nodes, facts, "nodes")
    tp, pp = facts.tensor_parallel, facts.pipeline_parallel
    stages = max(pp // nodes, 1)
    ranks = tp // max(nodes // pp, 1)
    for replica in range(facts.replicas_inside):
        for stage in range(stages):
            for rank in range(ranks):
                yield base + replica * tp * pp * step + stage * ranks + rank * step


def _said(facts: RoleFacts, given: str) -> str:
    return f"{facts.role.value} has {_FLAG} {given if len(given) <= _SHOWN else given[:_SHOWN] + ' ...'}"


def _unused(facts: RoleFacts, given: str, why: str) -> Hit:
    return Hit(
        f"{_said(facts, given)}, and {why}",
        change=f"drop {_FLAG}",
        outcome=Outcome.WARN,
        consequence="It has no effect.",
    )
