"""What the spec alone decides, beyond the fit of the two sides. What only one engine asks for is in `engine_checks`."""

from __future__ import annotations

from pdoperator.api.quantities import scaled
from pdoperator.api.spec import EnvVar, FabricType, PDClusterSpec, PodTemplate, RoleSpec
from pdoperator.domain.container_env import OWN_ENV
from pdoperator.domain.engine_checks import engine_findings
from pdoperator.domain.engine_flags import owned_flags
from pdoperator.domain.finding import Finding, fail, warn
from pdoperator.domain.nixl_checks import nixl_findings
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Backend, EngineType, Role


def spec_findings(spec: PDClusterSpec) -> list[Finding]:
    """What the spec alone decides, beyond the fit of the two sides."""
    found: list[Finding] = []
    for role in Role:
        found += _role(spec, role_spec(spec, role), f"spec.{role.value}")
    found += _without_effect_yet(spec)
    found += engine_findings(spec) + nixl_findings(spec)
    if not spec.model.source and not spec.model.volume:
        found.append(
            fail(
                "ModelMissing",
                "spec.model names neither source nor volume: the engine would have nothing to load",
                "Set spec.model.source, or mount the weights with spec.model.volume.",
            )
        )
    return found + _fabric(spec) + _rollout(spec)


def _role(spec: PDClusterSpec, side: RoleSpec, where: str) -> list[Finding]:
    found: list[Finding] = []
    for use in owned_flags(side.extra_args):
        found.append(fail("OwnedFlag", f"{where}.extraArgs: {use.message}", f"Remove it; {use.flag.advice}."))
    for env in side.env:
        found += _environment(spec, env, where)
    if spec.transfer.fabric.type is FabricType.RDMA and _not_root(side.template):
        found.append(
            warn(
                "MemlockNotRoot",
                f"{where}.template runs the engine as another user than root: IPC_LOCK then does not lift the "
                "memlock limit (often 8 MiB), and registering KV memory for RDMA fails",
                "Raise memlock in the container runtime, or run the engine as root.",
            )
        )
    if side.nodes_per_replica > 1:
        found.append(
            fail(
                "MultiNode",
                f"{where}.nodesPerReplica is {side.nodes_per_replica}: groups over several nodes are not built yet",
                f"Set {where}.nodesPerReplica to 1.",
            )
        )
    return found


def _environment(spec: PDClusterSpec, env: EnvVar, where: str) -> list[Finding]:
    found: list[Finding] = []
    if env.name in OWN_ENV:
        found.append(fail("OwnedEnv", f"{where}.env sets {env.name}, which the operator sets itself", "Remove it."))
    if env.name.startswith("NCCL_IB"):
        found.append(
            warn(
                "NCCLDoesNotSteer",
                f"{where}.env sets {env.name}: NCCL variables don't steer NIXL",
                "Use spec.transfer.fabric.devices to choose devices for KV transfer.",
            )
        )
    if env.name == "UCX_TLS" and env.value and spec.transfer.fabric.type is FabricType.RDMA:
        names = {t.strip() for t in env.value.split(",")}
        if spec.engine.type is EngineType.SGLANG and not names & {"all", "cuda", "cuda_copy", "cuda_ipc"}:
            found.append(
                fail(
                    "UCXTransports",
                    f"{where}.env sets UCX_TLS={env.value} without a cuda transport: UCX would take device memory for "
                    "host memory",
                    "Add cuda_copy and cuda_ipc to UCX_TLS, or leave it unset.",
                )
            )
    return found


def _not_root(template: PodTemplate) -> bool:
    contexts = (template.security_context or {}, template.container_security_context or {})
    return any(c.get("runAsNonRoot") or c.get("runAsUser") for c in contexts)


def _without_effect_yet(spec: PDClusterSpec) -> list[Finding]:
    own = spec.transfer.backend is Backend.PDCLUSTER  # other backends are probed by a request once an interval
    if not own:
        return []
    told = {
        "interval_seconds": ("intervalSeconds", "a pair is checked when it is wired"),
        "recycle": ("recycle", "a pod is replaced when its ranks report that they failed"),
    }
    found = []
    for name in sorted(told.keys() & spec.transfer.verification.model_fields_set):
        field = f"spec.transfer.verification.{told[name][0]}"
        message = f"{field} has no effect with backend PDCluster in this version: {told[name][1]}"
        found.append(warn("NoEffectYet", message, f"Leave {field} out."))
    return found


def _fabric(spec: PDClusterSpec) -> list[Finding]:
    fabric = spec.transfer.fabric
    if fabric.type is FabricType.TCP:
        return [
            warn(
                "TCPFabric",
                "KV travels over TCP: a 10 Gbit/s network moves about 1.2 GB/s, one 400 Gbit/s HCA about 40",
                "Set spec.transfer.fabric.type to RDMA where the nodes have HCAs.",
            )
        ]
    if fabric.resources or fabric.resource_claim_template or fabric.host_network or fabric.privileged:
        return []
    return [
        fail(
            "RDMAWithoutDevices",
            "spec.transfer.fabric.type is RDMA, but nothing brings an HCA into the pods",
            "Name spec.transfer.fabric.resources (for example rdma/hca), a resourceClaimTemplate, or hostNetwork; or "
            "set the type to TCP.",
        )
    ]


def _rollout(spec: PDClusterSpec) -> list[Finding]:
    found = []
    for name, count in (("maxSurge", spec.rollout.max_surge), ("maxUnavailable", spec.rollout.max_unavailable)):
        try:
            scaled(count, 1, round_up=True)
        except ValueError:
            found.append(fail("Rollout", f"spec.rollout.{name} is {count!r}", "Use a count or a percentage."))
    return found
