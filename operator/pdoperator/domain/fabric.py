"""FabricReady: is the network what was asked for? Decided by what nodes offer and what ranks report."""

from __future__ import annotations

from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.api.spec import FabricType, GPUDirect, PDClusterSpec
from pdoperator.domain.condition import Aspect, no, unknown, yes
from pdoperator.domain.observed import Observed
from pdoperator.domain.revision import role_spec
from pdoperator.domain.view import View
from pdtransfer.contract.base import Backend, Role

_KIND = ConditionType.FABRIC_READY
RDMA_MARKS = ("rc", "dc", "ud", "rdma", "ib", "mlx", "efa", "erdma", "srd", "verbs")


def is_rdma(transport: str) -> bool:
    """True for the names that UCX and libfabric give RDMA transports (rc_mlx5, dc_x, efa, verbs ...)."""
    name = transport.lower()
    return any(name == m or name.startswith((m + "_", m + "/", m + ":", m + "-")) for m in RDMA_MARKS) or (
        "mlx5" in name or "rdma" in name
    )


def fabric_ready(observed: Observed, spec: PDClusterSpec, view: View) -> Aspect:
    """The condition. A TCP fabric was asked for: it holds, and says what it costs."""
    fabric = spec.transfer.fabric
    if fabric.type is FabricType.TCP:
        return yes(
            _KIND,
            Reason.TCP_REQUESTED,
            "TCP was asked for: KV transfer is bound by the pod network (about 1.2 GB/s on 10 Gbit/s). "
            "Set spec.transfer.fabric.type to RDMA where the nodes have HCAs.",
            required=False,
        )
    offered = _resources(observed, spec)
    if offered is not None:
        return offered
    if spec.transfer.backend is not Backend.PDCLUSTER:
        return unknown(
            _KIND,
            Reason.NOT_MANAGED,
            f"backend {spec.transfer.backend.value} does not report which transport it uses; look at the engine's log",
            required=False,
        )
    if not view.peers:
        return unknown(_KIND, Reason.NOT_OBSERVED_YET, "no rank has reported its transports yet")
    for peer in view.peers:
        for card in peer.cards.cards:
            transports = card.transports
            if not transports and not card.devices:
                return unknown(
                    _KIND, Reason.NOT_OBSERVED_YET, f"{peer.pod.name} rank {card.rank} reports no transports yet"
                )
            if not any(is_rdma(t) for t in (*transports, *card.devices)):
                used = ", ".join((*transports, *card.devices)) or "nothing"
                reason = Reason.SILENT_TCP if any("tcp" in t.lower() for t in transports) else Reason.RDMA_NOT_FOUND
                return no(
                    _KIND,
                    reason,
                    f"RDMA was asked for, but {peer.pod.name} rank {card.rank} found only {used}. Check that the "
                    "pod has /dev/infiniband, its fabric resources, UCX_TLS and UCX_NET_DEVICES, and memlock "
                    "(IPC_LOCK).",
                )
    if fabric.gpu_direct is GPUDirect.REQUIRED:
        return unknown(
            _KIND,
            Reason.NOT_IMPLEMENTED_YET,
            "RDMA devices are in use, but evidence that bytes go to GPU memory without a host copy is not collected "
            "yet; set gpuDirect to Preferred to do without it",
        )
    return yes(_KIND, Reason.FABRIC_VERIFIED, "every rank reports RDMA devices")


def _resources(observed: Observed, spec: PDClusterSpec) -> Aspect | None:
    """What stands in the way on the nodes; None where nothing does or nobody may look."""
    fabric = spec.transfer.fabric
    if observed.nodes is None or not fabric.resources:
        return None
    for want in fabric.resources:
        offers = {n.name: n.allocatable.get(want.name, 0) for n in observed.nodes}
        best = max(offers.values(), default=0)
        if best == 0:
            there = sorted({r for n in observed.nodes for r, c in n.allocatable.items() if c > 0})
            return no(
                _KIND,
                Reason.RESOURCE_NOT_OFFERED,
                f"no node offers {want.name}; nodes offer {', '.join(there) or 'no extended resources'}. Install or "
                "repair the device plugin, or name the resource that this cluster has.",
            )
        if best < want.count:
            return no(
                _KIND,
                Reason.RESOURCE_EXHAUSTED,
                f"{want.count} of {want.name} per pod were asked for, but no node offers more than {best}. Lower the "
                "count or use larger nodes.",
            )
        total = sum(count // want.count for count in offers.values())
        pods = sum(role_spec(spec, role).replicas for role in Role)
        short = [p for p in observed.pods if p.unschedulable_message and want.name in p.unschedulable_message]
        if total < pods and short:
            return no(
                _KIND,
                Reason.RESOURCE_EXHAUSTED,
                f"the nodes hold {total} pods with {want.count} of {want.name} each, but {pods} are wanted: "
                f"{short[0].unschedulable_message}",
            )
    return None
