"""Why pods of a role are not ready yet, told apart: cannot schedule, cannot pull, loading, crashing, unwired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdoperator.api import names
from pdoperator.api.conditions import Reason
from pdoperator.domain.lifecycle import exit_evidence
from pdoperator.domain.observed import ContainerSeen, PodSeen
from pdoperator.domain.view import FAILED_PHASES

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CANNOT_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")
_CRASH = ("CrashLoopBackOff",)


def _waiting(pod: PodSeen, reasons: tuple[str, ...]) -> ContainerSeen | None:
    return next((c for c in pod.containers if c.waiting_reason in reasons), None)


def diagnose(pod: PodSeen, wired: bool, why_unwired: str, managed: bool) -> tuple[Reason, str]:
    """(reason, message) of a pod that is not ready."""
    if pod.phase in FAILED_PHASES:
        return Reason.CRASHING, f"{pod.name} is {pod.phase}: {exit_evidence(pod) or 'no container told why'}"
    if not pod.scheduled:
        if pod.unschedulable_message:
            return Reason.CANNOT_SCHEDULE, f"{pod.name} can not be scheduled: {pod.unschedulable_message}"
        return Reason.LAUNCHING, f"{pod.name} waits for the scheduler"
    stuck = _waiting(pod, _PULL)
    if stuck:
        return (
            Reason.CANNOT_PULL_IMAGE,
            f"{pod.name} can not pull the image of container {stuck.name}: {stuck.waiting_reason} "
            f"{stuck.waiting_message}. Check the image's name and the pull secrets.",
        )
    stuck = _waiting(pod, _CANNOT_START)
    if stuck:
        return (
            Reason.CANNOT_START,
            f"{pod.name} container {stuck.name} can not start: {stuck.waiting_reason} {stuck.waiting_message}",
        )
    evidence = exit_evidence(pod)
    stuck = _waiting(pod, _CRASH)
    engine = next((c for c in pod.containers if c.name == names.CONTAINER_ENGINE), None)
    if stuck or (engine and engine.restarts and not engine.ready and evidence and not pod.containers_ready):
        logs = f"See kubectl logs {pod.name} -c {(stuck or engine or ContainerSeen('engine')).name} --previous."
        restarts = max((c.restarts for c in pod.containers), default=0)
        return Reason.CRASHING, f"{pod.name} restarted {restarts} times: {evidence or 'exit code unknown'}. {logs}"
    if engine is None or not engine.running:
        return Reason.LAUNCHING, f"{pod.name} is starting its containers"
    if not engine.ready:
        if wired:
            return Reason.WIRED_BUT_FAILING, f"{pod.name} is wired, but its engine does not answer that it is ready"
        return Reason.LOADING, f"{pod.name}'s engine is loading"
    if managed and not wired:
        return Reason.WAITING_FOR_WIRING, f"{pod.name}: {why_unwired or 'not wired to its peers yet'}"
    if not pod.containers_ready:
        return Reason.WAITING_FOR_WIRING, f"{pod.name}'s sidecar is not ready yet: {why_unwired or 'wiring'}"
    return Reason.LAUNCHING, f"{pod.name} is about to become ready"


_WORST = (
    Reason.CRASHING,
    Reason.CANNOT_START,
    Reason.CANNOT_PULL_IMAGE,
    Reason.CANNOT_SCHEDULE,
    Reason.WIRED_BUT_FAILING,
    Reason.WAITING_FOR_WIRING,
    Reason.LOADING,
    Reason.LAUNCHING,
)


def worst(
    pods: Sequence[PodSeen], wired: frozenset[str], why: Mapping[str, str], managed: bool
) -> tuple[Reason, str] | None:
    """What stands most in the way among these pods; None when all are ready."""
    found = [diagnose(p, p.uid in wired, why.get(p.uid, ""), managed) for p in pods if not p.ready]
    return min(found, key=lambda f: _WORST.index(f[0]), default=None)
