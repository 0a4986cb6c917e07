"""One look at the real requests where a backend of SGLang's own moves the KV: results in, probes and proof out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdoperator.api.names import CONTAINER_ENGINE
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.gates import Gates
from pdoperator.domain.observed import Observed, PodSeen
from pdoperator.domain.realprobe import History, Unit, due_probes, forget, remember
from pdoperator.domain.realproof import RealProof, prove
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
    pods = [
        p
        for p in engine_pods(observed)
        if p.uid in gates.ready and p.ready and p.ip and not p.deleting and p.uid not in leaving
    ]
    units: list[Unit] = []
    decodes: dict[str, tuple[ProbeEnd, ...]] = {}
    for pod in pods:
        island = gates.island.get(pod.uid, "")
        if pod.engine_role is Role.DECODE:
            decodes[island] = (*decodes.get(island, ()), _end(pod))
            continue
        ranks = _attention_dp(spec) if pod.revision == revisions.get(Role.PREFILL) else 1
        units += [Unit(_end(pod), rank, ranks, island) for rank in range(ranks)]
    history = forget(remember(before, observed.probes.results), units, decodes)
    interval = float(spec.transfer.verification.interval_seconds)
    starts = due_probes(units, decodes, history, observed.probes.running, interval, observed.now, settings)
    return RealRound(prove(units, decodes, history, settings), starts, history)


def _attention_dp(spec: PDClusterSpec) -> int:
    """Attention-DP ranks of prefill that a room number can choose from. (What the spec says about pods of another
    revision is not known; one rank of theirs is proven.)"""
    if spec.engine.type is EngineType.REFERENCE:
        return 1
    side = role_spec(spec, Role.PREFILL)
    if read_flags(side.extra_args).values.get("load_balance_method", "auto") not in ("auto", "follow_bootstrap_room"):
        return 1  # The room number chooses nothing then.
    return side.attention_data_parallel_size
