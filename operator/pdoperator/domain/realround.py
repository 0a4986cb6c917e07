"""One look at the real requests where a backend of SGLang's own moves the KV: results in, probes and proof out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pdoperator.api.conditions import Reason
from pdoperator.api.names import CONTAINER_ENGINE
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.gates import Gates
from pdoperator.domain.observed import Observed, PodSeen
from pdoperator.domain.realprobe import History, Unit, due_probes, forget, remember
from pdoperator.domain.realproof import RealProof, prove
from pdoperator.domain.realrecycle import failing_prefill
from pdoperator.domain.revision import role_spec
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.view import engine_pods
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.sglang_cli import read_flags


@dataclass(frozen=True)
class RealRound:
    """The proof so far, the probes to start, and the history to remember."""

    proof: RealProof
    starts: tuple[StartProbe, ...]
    history: History


def _end(pod: PodSeen) -> ProbeEnd:
    restarts = next((c.restarts for c in pod.containers if c.name == CONTAINER_ENGINE), 0)
    return ProbeEnd(pod.name, pod.uid, pod.ip, restarts)


def real_round(
    observed: Observed,
    spec: PDClusterSpec | None,
    gates: Gates,
    leaving: frozenset[str],
    revisions: Mapping[Role, str],
    before: History,
    settings: DecideSettings,
) -> RealRound | None:
    """None where the operator proves transfers otherwise, or does not know what runs."""
    if spec is None or spec.transfer.backend is Backend.PDCLUSTER:
        return None
    serving = {uid: gates.island.get(uid, "") for uid in gates.ready}
    units, decodes = _ends(observed, spec, serving, leaving, revisions)
    history = forget(remember(before, observed.probes.results), units, decodes)
    interval = float(spec.transfer.verification.interval_seconds)
    starts = due_probes(units, decodes, history, observed.probes.running, interval, observed.now, settings)
    proof = prove(units, decodes, history, settings, recycles=spec.transfer.verification.recycle)
    return RealRound(proof, starts, history)


def recycled(
    observed: Observed,
    spec: PDClusterSpec | None,
    serving: Mapping[str, str],
    leaving: Collection[str],
    revisions: Mapping[Role, str],
    before: History,
    last: float,
    settings: DecideSettings,
) -> dict[str, tuple[Reason, str]]:
    """UID of the prefill pod to replace now, with the event's reason and message. `serving` are the pods that the
    operator does not wire, with their islands; `last` is when a pod was replaced so before."""
    if spec is None or spec.transfer.backend is Backend.PDCLUSTER or not spec.transfer.verification.recycle:
        return {}
    units, decodes = _ends(observed, spec, serving, leaving, revisions)
    history = forget(remember(before, observed.probes.results), units, decodes)
    found = failing_prefill(units, decodes, history, last, observed.now, settings)
    return {uid: (Reason.RECYCLED, why) for uid, why in found.items()}


def _ends(
    observed: Observed,
    spec: PDClusterSpec,
    serving: Mapping[str, str],
    leaving: Collection[str],
    revisions: Mapping[Role, str],
) -> tuple[list[Unit], dict[str, tuple[ProbeEnd, ...]]]:
    """Prefill ranks and, by island, decode pods that take requests now."""
    pods = [
        p
        for p in engine_pods(observed)
        if p.uid in serving and p.ready and p.ip and not p.deleting and p.uid not in leaving
    ]
    units: list[Unit] = []
    decodes: dict[str, tuple[ProbeEnd, ...]] = {}
    for pod in pods:
        island = serving[pod.uid]
        if pod.engine_role is Role.DECODE:
            decodes[island] = (*decodes.get(island, ()), _end(pod))
            continue
        ranks = _attention_dp(spec) if pod.revision == revisions.get(Role.PREFILL) else 1
        units += [Unit(_end(pod), rank, ranks, island) for rank in range(ranks)]
    return units, decodes


def _attention_dp(spec: PDClusterSpec) -> int:
    """Attention-DP ranks of prefill that a room number can choose from. (What the spec says about pods of another
    revision is not known; one rank of theirs is proven.)"""
    if spec.engine.type is EngineType.REFERENCE:
        return 1
    side = role_spec(spec, Role.PREFILL)
    if read_flags(side.extra_args).values.get("load_balance_method", "auto") not in ("auto", "follow_bootstrap_room"):
        return 1  # The room number chooses nothing then.
    return side.attention_data_parallel_size
