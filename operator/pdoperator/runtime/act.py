"""Carries out one action wherever it goes: API server, sidecars or routers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdoperator.api.conditions import Reason
from pdoperator.domain.actions import Action, CreatePod, EmitEvent, PutRoster, SetWorkers, StartProbe
from pdoperator.domain.observed import Observed
from pdoperator.kube.execute import KubeExecutor, Outcome, describe, run_all
from pdoperator.pods.engine_probe import EngineProber
from pdoperator.pods.router import RouterClient, RouterError
from pdoperator.pods.sidecar import SidecarClient

log = logging.getLogger(__name__)


class Actor:
    """`may_act` is the Lease's word; `router_key` derives a PDCluster's key."""

    def __init__(
        self,
        kube: KubeExecutor,
        sidecars: SidecarClient,
        routers: RouterClient,
        router_key: Callable[[str], str],
        may_act: Callable[[], bool],
        prober: EngineProber,
    ) -> None:
        self._kube, self._sidecars, self._routers = kube, sidecars, routers
        self._router_key, self._may_act = router_key, may_act
        self._prober = prober

    async def run(self, observed: Observed, actions: tuple[Action, ...]) -> list[Outcome]:
        """All of them; raises NotLeading when the Lease is lost meanwhile."""
        work = [a for a in actions if not isinstance(a, EmitEvent)]
        told = [a for a in actions if isinstance(a, EmitEvent)]
        outcomes = await run_all(work, lambda action: self._one(observed, action), self._may_act)
        if not any(isinstance(o.action, CreatePod) and o.problem is None for o in outcomes):
            # Refused, or held back after a refusal: nothing was launched.
            told = [e for e in told if e.reason != Reason.LAUNCHED]
        return outcomes + await run_all(told, lambda action: self._one(observed, action), self._may_act)

    async def _one(self, observed: Observed, action: Action) -> Outcome:
        where = f"namespace={observed.cluster.namespace} name={observed.cluster.name}"
        match action:
            case PutRoster():
                result = await self._sidecars.put_roster(action.pod_ip, action.roster)
                if not result.taken:
                    # No failure of the API: the pod's next card says what it holds, and decide() answers that.
                    held = result.refusal.reason if result.refusal else result.error
                    log.warning(
                        "%s pod=%s action=put-roster term=%d counter=%d reason=%s message=%r",
                        where, action.pod_name, action.roster.key.term, action.roster.key.counter, held,
                        result.message,
                    )  # fmt: skip
                return Outcome(action)
            case SetWorkers():
                try:
                    await self._routers.set_workers(action, self._router_key(observed.cluster.uid))
                except RouterError as error:
                    log.warning("%s pod=%s action=set-workers reason=%s message=%r", where, action.router_pod,
                                Reason.ROUTER_UNREACHABLE, str(error))  # fmt: skip
                return Outcome(action)
            case StartProbe():
                self._prober.start(observed.cluster.uid, action)
                return Outcome(action)
            case _:
                outcome = await self._kube.run(observed, action)
                if outcome.problem is not None:
                    log.warning("%s action=%r reason=%s message=%r", where, describe(action),
                                outcome.problem.reason, outcome.problem.message)  # fmt: skip
                elif not outcome.silent:
                    log.info("%s action=%r", where, describe(action))
                return outcome
