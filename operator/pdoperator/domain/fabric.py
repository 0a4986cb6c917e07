"""FabricReady: is the network what was asked for? Decided by what nodes offer and what ranks report."""

from __future__ import annotations

from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.api.spec import FabricType, GPUDirect, PDClusterSpec
from pdoperator.domain.condition import Aspect, no, unknown, yes
from pdoperator.domain.observed import Observed
from pdoperator.domain.revision import role_spec
from pdoperator.domain.verification import Verification
from pdoperator.domain.view import View
from pdtransfer.contract.base import Backend, Role

_KIND = ConditionType.FABRIC_READY


def fabric_ready(observed: Observed, spec: PDClusterSpec, view: View, proof: Verification) -> Aspect:
    """The condition. A TCP fabric was asked for: it holds, and says what it costs. RDMA holds only on the
    evidence of the probes (the adapters' own byte counters): a working transfer alone may be TCP."""
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
        return unknown(_KIND, Reason.NOT_OBSERVED_YET, "no rank has reported its adapters yet")
    for peer in view.peers:
        for card in peer.cards.cards:
            if not card.devices:
                return no(
                    _KIND,
                    Reason.RDMA_NOT_FOUND,
                    f"RDMA was asked for, but {peer.pod.name} rank {card.rank} found no HCA with a /dev/infiniband "
                    "node, so KV goes over TCP. Check the pod's fabric resources and their device plugin, or set "
                    "spec.transfer.fabric.type to TCP.",
                )
    if not proof.proven:
        return unknown(_KIND, Reason.NOT_OBSERVED_YET, "HCAs are there, but no probe has moved bytes yet")
    used = proof.transport.split("+")
    if any(t.startswith("TCP") for t in used):
        return no(
            _KIND,
            Reason.SILENT_TCP,
            f"RDMA was asked for and HCAs are there, but KV went over TCP ({proof.evidence}). Check UCX_TLS and "
            "UCX_NET_DEVICES in the pod, the HCA's link and GID, and memlock (IPC_LOCK).",
        )
    if used != ["RDMA"]:
        return unknown(
            _KIND, Reason.NOT_IMPLEMENTED_YET, f"HCAs are there, but not what went over them: {proof.evidence}"
        )
    if fabric.gpu_direct is GPUDirect.REQUIRED:
        return unknown(
            _KIND,
            Reason.NOT_IMPLEMENTED_YET,
            "RDMA devices are in use, but evidence that bytes go to GPU memory without a host copy is not collected "
            "yet; set gpuDirect to Preferred to do without it",
        )
    return yes(_KIND, Reason.FABRIC_VERIFIED, f"KV goes over RDMA: {proof.evidence}")


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
