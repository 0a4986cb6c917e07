"""One look at one PDCluster: observe, ask the pods, decide, act, write status. Holds no truth of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.api.names import CONTAINER_ROUTER
from pdoperator.domain.actions import Apply, Decision, Delete, EmitEvent, Memory
from pdoperator.domain.condition import old_condition
from pdoperator.domain.observed import ClusterObject, Observed, PodSeen, RouterPodSeen
from pdoperator.domain.settings import DecideSettings
from pdoperator.kube.events import EventRecorder
from pdoperator.kube.execute import Outcome, describe
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.kube.observe import Observer, Problem, problem_of
from pdoperator.kube.parse import cluster_object, seconds
from pdoperator.kube.port import KubeError, KubePort
from pdoperator.pods.engine_probe import EngineProber
from pdoperator.pods.router import RouterClient, RouterError
from pdoperator.pods.sidecar import SidecarClient
from pdoperator.runtime.act import Actor
from pdoperator.runtime.blocked import blocked_status
from pdoperator.runtime.carried import ClusterState, Result
from pdoperator.runtime.patience import news, stretched
from pdoperator.runtime.refused import STATUS_WRITE

log = logging.getLogger(__name__)

_ERRORS_BEFORE_STATUS = 3
"""A 5xx or a cut connection is told in status only when it lasts; a 403 at once."""

_PEEKS = 5


class Decide(Protocol):
    """domain.decide.decide."""

    def __call__(self, observed: Observed, memory: Memory, settings: DecideSettings) -> Decision: ...


class Keys(Protocol):
    """What status and routers need of the operator's credentials."""

    @property
    def ca_fingerprint(self) -> str: ...
    @property
    def longest(self) -> float: ...
    def router_key(self, cluster_uid: str) -> str: ...


class Reconciler:
    """Stateless but for its clients; safe to use for many PDClusters at once."""

    def __init__(
        self,
        *,
        kube: KubePort,
        observer: Observer,
        sidecars: SidecarClient,
        routers: RouterClient,
        prober: EngineProber,
        actor: Actor,
        events: EventRecorder,
        keys: Keys,
        decide: Decide,
        settings: DecideSettings,
        term: Callable[[], int],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._kube, self._observer, self._actor, self._events = kube, observer, actor, events
        self._sidecars, self._routers, self._keys = sidecars, routers, keys
        self._prober = prober
        self._decide, self._settings = decide, settings
        self._term, self._now = term, now

    async def once(self, state: ClusterState) -> Result:
        """Raises NotLeading when the Lease is lost; any other exception is a bug or a broken object."""
        try:
            manifest = await self._kube.get(PDCLUSTER_API, "PDCluster", state.namespace, state.name)
        except KubeError as error:
            log.warning("%s action=get error=%r", _where(state), str(error))
            return Result(failed=True, blind=True)
        if manifest is None or manifest["metadata"].get("uid") != state.uid:
            return Result(gone=True)
        cluster = cluster_object(manifest)
        state.version, state.stale = str(manifest["metadata"].get("resourceVersion", "")), False
        if cluster.deleting:
            # Foreground deletion or somebody's finalizer: the garbage collector is at work, not us.
            return Result(requeue_after=30.0)
        try:
            observed = await self._observe(cluster, state)
        except KubeError as error:
            return await self._blocked(cluster, state, problem_of(error, "read what this PDCluster owns"))
        try:
            decision = self._decide(observed, state.memory, self._settings)
        except Exception as error:
            # A bug, or an object nobody foresaw: said where the user looks, and tried again with backoff.
            log.exception("%s action=decide error=unexpected", _where(state))
            text = f"the operator could not decide ({type(error).__name__}): see its log, and please report it"
            return await self._blocked(cluster, state, Problem(Reason.API_ERROR, text))
        state.memory = decision.memory
        state.refused.look(cluster.generation, [describe(a) for a in decision.actions], observed.now)
        actions = tuple(a for a in decision.actions if state.refused.due(describe(a), observed.now))
        outcomes = await self._actor.run(observed, actions)
        if any(isinstance(a, Apply | Delete) for a in actions):
            self._observer.invalidate(state.uid)
        for outcome in outcomes:
            state.refused.tried(describe(outcome.action), outcome.problem, observed.now)
        state.problem = state.refused.problem
        status = self._status(cluster, decision, outcomes)
        written = await self._write_status(cluster, state, status)
        busy = status is not None or any(not isinstance(a, EmitEvent) for a in actions)
        state.quiet = 0 if busy or news(state.answers, observed.answers) else state.quiet + 1
        state.answers = observed.answers
        failed = state.problem is not None or not written
        state.errors = 0
        wait = stretched(decision.requeue_after, state.quiet, bool(observed.answers or observed.routers))
        calm = state.quiet > 1 and not failed and not state.stale and wait >= self._settings.idle_requeue
        calm = calm and decision.requeue_after >= self._settings.idle_requeue
        state.seen = observed if calm else None
        return Result(requeue_after=0.1 if state.stale else wait, failed=failed, peeks=_PEEKS if calm else 0)

    async def peek(self, state: ClusterState) -> bool:
        """Between two looks at a calm PDCluster: asks its pods and routers, and nothing of the API server
        (watch events tell about that). True when somebody says something new, so that a look is due."""
        seen = state.seen
        if seen is None:
            return True
        answers, routers = await asyncio.gather(
            self._sidecars.ask(seen.cluster.uid, seen.pods),
            asyncio.gather(*(self._router(seen.cluster.uid, r.pod) for r in seen.routers)),
        )
        return news(seen.answers, answers) or tuple(routers) != seen.routers

    async def forget(self, uid: str) -> None:
        """Free what is kept for a PDCluster that is gone."""
        self._events.forget(uid)
        self._observer.forget(uid)
        await self._sidecars.forget(uid)
        await self._prober.forget(uid)

    # --- inside -------------------------------------------------------------------------------

    async def _observe(self, cluster: ClusterObject, state: ClusterState) -> Observed:
        # Thousands of nodes are not read for specs that ask for nothing only some of them have.
        children = await self._observer.children(cluster, self._now())
        nodes = await self._observer.nodes() if asks_for_devices(cluster) else None
        answers, routers = await asyncio.gather(
            self._sidecars.ask(cluster.uid, children.pods),
            asyncio.gather(*(self._router(cluster.uid, p) for p in children.router_pods)),
        )
        told = state.problem
        return Observed(
            now=self._now(),
            cluster=cluster,
            pods=children.pods,
            answers=answers,
            routers=tuple(routers),
            probes=self._prober.look(cluster.uid),
            router_deployment=children.fixtures.router_deployment,
            services=children.fixtures.services,
            children=children.fixtures.hashes,
            stored=children.fixtures.stored,
            nodes=nodes,
            term=self._term(),
            certificate_not_after=self._certificate_end(cluster),
            api_error=told.message if told else "",
            api_error_reason=str(told.reason) if told else "",
        )

    async def _router(self, uid: str, pod: PodSeen) -> RouterPodSeen:
        running = any(c.name == CONTAINER_ROUTER and c.running for c in pod.containers)
        if not pod.ip or not running:
            return RouterPodSeen(pod, error="not running yet")
        try:
            return RouterPodSeen(pod, await self._routers.workers(pod.ip, self._keys.router_key(uid)))
        except RouterError as error:
            return RouterPodSeen(pod, error=str(error))

    def _certificate_end(self, cluster: ClusterObject) -> float | None:
        """From status; a certificate of another CA counts as none."""
        kept = cluster.status.get("certificates") or {}
        if kept.get("fingerprint") != self._keys.ca_fingerprint:
            return None
        end = seconds(kept.get("notAfter")) or None
        # A certificate that lasts as long as its CA can not be renewed, only replaced with the CA.
        return math.inf if end is not None and end >= int(self._keys.longest) else end

    @staticmethod
    def _status(cluster: ClusterObject, decision: Decision, outcomes: list[Outcome]) -> dict[str, Any] | None:
        """decide()'s status, plus what is remembered of the pods' certificate. None: nothing to write."""
        issued = next((o.certificates for o in outcomes if o.certificates is not None), None)
        if decision.status is None and issued is None:
            return None
        status = dict(cluster.status if decision.status is None else decision.status)
        kept = issued or cluster.status.get("certificates")
        if kept:
            status["certificates"] = kept
        return None if status == cluster.status else status

    async def _write_status(self, cluster: ClusterObject, state: ClusterState, status: dict[str, Any] | None) -> bool:
        if status is None or not state.refused.due(STATUS_WRITE, self._now()):
            return status is None
        manifest = {
            "apiVersion": PDCLUSTER_API,
            "kind": "PDCluster",
            # The version that was read: neither a namesake made meanwhile nor a newer spec gets a status
            # that is not about it.
            "metadata": {
                "name": cluster.name,
                "namespace": cluster.namespace,
                "resourceVersion": state.version,
            },
            "status": status,
        }
        try:
            await self._kube.apply(manifest, subresource="status")
            _log_change(cluster, status)
        except KubeError as error:
            if error.status in (404, 409):
                state.stale = True  # it changed or went meanwhile: look again at once
                return True
            state.problem = problem_of(error, STATUS_WRITE)
            state.refused.tried(STATUS_WRITE, state.problem, self._now())
            log.warning(
                "%s action=status reason=%s message=%r", _where(state), state.problem.reason, state.problem.message
            )
            await self._tell(cluster, state.problem)
            return False
        state.refused.tried(STATUS_WRITE, None, self._now())
        return True

    async def _blocked(self, cluster: ClusterObject, state: ClusterState, problem: Problem) -> Result:
        state.problem = problem
        state.errors += 1
        log.warning("%s action=observe reason=%s message=%r", _where(state), problem.reason, problem.message)
        lasting = problem.reason == Reason.API_FORBIDDEN or state.errors >= _ERRORS_BEFORE_STATUS
        if lasting:
            await self._write_status(cluster, state, blocked_status(cluster, problem, self._now()))
        return Result(failed=True, blind=True)

    async def _tell(self, cluster: ClusterObject, problem: Problem) -> None:
        """An Event, for what status itself can not say."""
        try:
            await self._events.emit(cluster, EmitEvent("Warning", str(problem.reason), problem.message))
        except KubeError as error:
            log.warning("namespace=%s name=%s action=event error=%r", cluster.namespace, cluster.name, str(error))


def asks_for_devices(cluster: ClusterObject) -> bool:
    """True when the spec names an extended resource (a name with a domain): what nodes offer matters."""
    raw = cluster.raw_spec
    if ((raw.get("transfer") or {}).get("fabric") or {}).get("resources"):
        return True
    parts = [(raw.get(role) or {}).get("resources") or {} for role in ("prefill", "decode")]
    return any(
        "/" in name for part in parts for amounts in part.values() if isinstance(amounts, dict) for name in amounts
    )


def _log_change(cluster: ClusterObject, status: dict[str, Any]) -> None:
    """One line when Ready turns, or fails for another reason."""
    was, now = (old_condition(s, ConditionType.READY) for s in (cluster.status, status))
    if (was.get("status"), was.get("reason")) != (now.get("status"), now.get("reason")):
        log.info(
            "namespace=%s name=%s ready=%s reason=%s message=%r", cluster.namespace, cluster.name,
            now.get("status"), now.get("reason"), now.get("message"),
        )  # fmt: skip


def _where(state: ClusterState) -> str:
    return f"namespace={state.namespace} name={state.name}"
