"""Does it fit? From the spec before a pod is launched, and from the ranks' cards before anything is wired."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdoperator.api.quantities import scaled
from pdoperator.api.spec import FabricType, PDClusterSpec, PluginSpec, PodTemplate
from pdoperator.domain.container_env import OWN_ENV
from pdoperator.domain.engine_flags import owned_flags, parse_fact_flags
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.revision import role_spec
from pdtransfer.contract import compat
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.geometry import ModelGeometry

SAME_ENGINE = "V1"
"""Rule about one engine and version on both sides."""


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ")")) else ".")


@dataclass(frozen=True)
class Finding:
    """One line of a preflight answer. `status`: Pass, Warn, Fail or Unknown."""

    rule: str
    status: str
    message: str
    action: str = ""

    @property
    def text(self) -> str:
        """Rule, message and action in one line."""
        return f"{self.rule}: {sentence(self.message)} {sentence(self.action)}".strip()

    def to_dict(self) -> dict[str, str]:
        """The four fields, as `pdcluster preflight -o json` prints them."""
        return {"rule": self.rule, "status": self.status, "message": self.message, "action": self.action}


@dataclass(frozen=True)
class Preflight:
    """All findings, and what they add up to."""

    findings: tuple[Finding, ...]

    def of(self, status: str) -> tuple[Finding, ...]:
        """Findings of one status."""
        return tuple(f for f in self.findings if f.status == status)

    @property
    def verdict(self) -> str:
        """Fail when anything fails, else Unknown when a fact is missing, else Pass (warnings pass)."""
        if self.of("Fail"):
            return "Fail"
        return "Unknown" if self.of("Unknown") else "Pass"


def _fail(rule: str, message: str, action: str) -> Finding:
    return Finding(rule, "Fail", message, action)


def _warn(rule: str, message: str, action: str) -> Finding:
    return Finding(rule, "Warn", message, action)


def spec_findings(spec: PDClusterSpec) -> list[Finding]:
    """What the spec alone decides, beyond the fit of the two sides."""
    found: list[Finding] = []
    if spec.engine.type is EngineType.SGLANG and spec.transfer.backend is Backend.PDCLUSTER:
        found.append(
            _fail(
                "EngineNotSupportedYet",
                "this version has no plugin that brings transfer.backend PDCluster into SGLang",
                "Set spec.engine.type to Reference, or spec.transfer.backend to NIXL or Mooncake (SGLang's own: "
                "launched and routed, not wired).",
            )
        )
    for role in Role:
        side = role_spec(spec, role)
        where = f"spec.{role.value}"
        for use in owned_flags(side.extra_args):
            found.append(_fail("OwnedFlag", f"{where}.extraArgs: {use.message}", f"Remove it; {use.flag.advice}."))
        for problem in parse_fact_flags(side.extra_args).problems:
            found.append(_fail("EngineFlag", f"{where}.extraArgs: {problem}", "Correct the flag."))
        for env in side.env:
            if env.name in OWN_ENV:
                found.append(
                    _fail("OwnedEnv", f"{where}.env sets {env.name}, which the operator sets itself", "Remove it.")
                )
            if env.name.startswith("NCCL_IB"):
                found.append(
                    _warn(
                        "NCCLDoesNotSteer",
                        f"{where}.env sets {env.name}: NCCL variables don't steer NIXL",
                        "Use spec.transfer.fabric.devices to choose devices for KV transfer.",
                    )
                )
            if env.name == "UCX_TLS" and env.value and spec.transfer.fabric.type is FabricType.RDMA:
                names = {t.strip() for t in env.value.split(",")}
                if spec.engine.type is EngineType.SGLANG and not names & {"all", "cuda", "cuda_copy", "cuda_ipc"}:
                    found.append(
                        _fail(
                            "UCXTransports",
                            f"{where}.env sets UCX_TLS={env.value} without a cuda transport: UCX would take "
                            "device memory for host memory",
                            "Add cuda_copy and cuda_ipc to UCX_TLS, or leave it unset.",
                        )
                    )
        if spec.transfer.fabric.type is FabricType.RDMA and _not_root(side.template):
            found.append(
                _warn(
                    "MemlockNotRoot",
                    f"{where}.template runs the engine as another user than root: IPC_LOCK then does not lift the "
                    "memlock limit (often 8 MiB), and registering KV memory for RDMA fails",
                    "Raise memlock in the container runtime, or run the engine as root.",
                )
            )
        if side.nodes_per_replica > 1:
            found.append(
                _fail(
                    "MultiNode",
                    f"{where}.nodesPerReplica is {side.nodes_per_replica}: groups over several nodes are not built yet",
                    f"Set {where}.nodesPerReplica to 1.",
                )
            )
        if spec.engine.type is EngineType.REFERENCE:
            for field, value in (
                ("pipelineParallelSize", side.pipeline_parallel_size),
                ("attentionDataParallelSize", side.attention_data_parallel_size),
            ):
                if value > 1:
                    found.append(
                        _fail(
                            "ReferenceParallelism",
                            f"{where}.{field} is {value}, but the Reference engine splits by tensor only",
                            f"Set {where}.{field} to 1, or use the SGLang engine.",
                        )
                    )
    found += _without_effect_yet(spec)
    if spec.engine.type is EngineType.REFERENCE:
        found += _not_of_reference(spec)
    if not spec.model.source and not spec.model.volume:
        found.append(
            _fail(
                "ModelMissing",
                "spec.model names neither source nor volume: the engine would have nothing to load",
                "Set spec.model.source, or mount the weights with spec.model.volume.",
            )
        )
    if spec.transfer.fabric.type is FabricType.TCP:
        found.append(
            _warn(
                "TCPFabric",
                "KV travels over TCP: a 10 Gbit/s network moves about 1.2 GB/s, one 400 Gbit/s HCA about 40",
                "Set spec.transfer.fabric.type to RDMA where the nodes have HCAs.",
            )
        )
    elif not (
        spec.transfer.fabric.resources
        or spec.transfer.fabric.resource_claim_template
        or spec.transfer.fabric.host_network
        or spec.transfer.fabric.privileged
    ):
        found.append(
            _fail(
                "RDMAWithoutDevices",
                "spec.transfer.fabric.type is RDMA, but nothing brings an HCA into the pods",
                "Name spec.transfer.fabric.resources (for example rdma/hca), a resourceClaimTemplate, or "
                "hostNetwork; or set the type to TCP.",
            )
        )
    rollout = (("maxSurge", spec.rollout.max_surge), ("maxUnavailable", spec.rollout.max_unavailable))
    for name, count in rollout:
        try:
            scaled(count, 1, round_up=True)
        except ValueError:
            found.append(_fail("Rollout", f"spec.rollout.{name} is {count!r}", "Use a count or a percentage."))
    return found


def _without_effect_yet(spec: PDClusterSpec) -> list[Finding]:
    told = []
    if "interval_seconds" in spec.transfer.verification.model_fields_set:
        told.append(("spec.transfer.verification.intervalSeconds", "a pair is checked when it is wired"))
    if spec.decode.host_kv.size is not None:
        told.append(("spec.decode.hostKV.size", "the engine sizes its host memory itself"))
    return [
        _warn("NoEffectYet", f"{field} has no effect in this version: {why}", f"Leave {field} out.")
        for field, why in told
    ]


def _not_of_reference(spec: PDClusterSpec) -> list[Finding]:
    """What the Reference engine would pass over without a word."""
    told = [f"spec.{role.value}.hierarchicalCache" for role in Role if role_spec(spec, role).hierarchical_cache]
    if spec.transfer.plugin != PluginSpec():
        told.append("spec.transfer.plugin")
    return [
        _fail(
            "ReferenceSetting",
            f"{field} is set, but the Reference engine does not have it",
            f"Remove {field}, or use the SGLang engine.",
        )
        for field in told
    ]


def _not_root(template: PodTemplate) -> bool:
    contexts = (template.security_context or {}, template.container_security_context or {})
    return any(c.get("runAsNonRoot") or c.get("runAsUser") for c in contexts)


def preflight(spec: PDClusterSpec, geometry: ModelGeometry | None = None) -> Preflight:
    """Everything that can be said before a pod exists."""
    found = spec_findings(spec)
    try:
        prefill, decode = spec_facts(spec, geometry)
    except ValueError as e:
        found.append(_fail("Facts", f"the spec's values do not make a model: {e}", "Correct spec.model.geometry."))
        return Preflight(tuple(found))
    report = compat.check(prefill, decode, spec.transfer.backend)
    for f in from_report(report.findings):
        if f.rule == SAME_ENGINE and f.status == "Unknown":
            # One object names one image for both roles: whatever version it holds, it is the same one.
            f = Finding(f.rule, "Pass", f"both roles run {spec.engine.image}")
        found.append(f)
    return Preflight(tuple(found))


def from_report(findings: Iterable[compat.Finding]) -> list[Finding]:
    """Findings of the contract's rules in the operator's form."""
    return [Finding(f.rule, f.status.value, f.message or f.title, f.action) for f in findings]
