"""Why pods of a role are not ready yet, told apart: cannot schedule, cannot pull, cannot mount, loading,
crashing, unwired. Each message says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdoperator.api import names
from pdoperator.api.conditions import Reason
from pdoperator.domain.lastwords import one_line
from pdoperator.domain.lifecycle import exit_evidence
from pdoperator.domain.observed import ContainerSeen, PodSeen
from pdoperator.domain.view import FAILED_PHASES
from pdoperator.domain.words import count

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CANNOT_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")
_CRASH = ("CrashLoopBackOff",)
_NEVER_RAN = ("StartError", "ContainerCannotRun")
_IMAGE_OF = {
    names.CONTAINER_ENGINE: "spec.engine.image",
    names.CONTAINER_SIDECAR: "spec.transfer.image",
    names.CONTAINER_INSTALLER: "spec.transfer.image",
    names.CONTAINER_ROUTER: "spec.router.image",
}
_VOLUMES = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_OF_RUNNING = ("Unhealthy", "ProbeWarning")
"""Warnings about a container that runs: a look at the pod that is older than them says otherwise."""

_NOT_SYNCED = "failed to sync"
SYNC_SECONDS = 60.0
"""A busy kubelet needs several tries until its caches know a ConfigMap or Secret: no news for so long."""
STUCK_SECONDS = 20.0
"""A scheduled pod none of whose containers got an image or a start for so long is stuck."""


def not_starting(pod: PodSeen) -> bool:
    """True while a scheduled pod has no container that ever started and none that says why: then only
    its events tell."""
    return (
        bool(pod.node)
        and pod.phase == "Pending"
        and not pod.deleting
        and not any(
            c.running or c.last_exit_code is not None or c.waiting_reason in (*_PULL, *_CANNOT_START)
            for c in pod.containers
        )
    )


def _waiting(pod: PodSeen, reasons: tuple[str, ...]) -> ContainerSeen | None:
    return next((c for c in pod.containers if c.waiting_reason in reasons), None)


def diagnose(
    pod: PodSeen, wired: bool, why_unwired: str, managed: bool, because: Reason | None = None, now: float = 0.0
) -> tuple[Reason, str]:
    """(reason, message) of a pod that is not ready. `because` is why it is not wired, for machines."""
    if pod.phase in FAILED_PHASES:
        return Reason.CRASHING, f"{pod.name} is {pod.phase}: {exit_evidence(pod) or 'no container told why'}"
    if not pod.scheduled:
        if pod.unschedulable_message:
            return (
                Reason.CANNOT_SCHEDULE,
                f"{pod.name} can not be scheduled: {_sentence(one_line(pod.unschedulable_message, 600))} Lower what "
                "the role asks for (resources, nodeSelector, affinity), or add nodes.",
            )
        return Reason.LAUNCHING, f"{pod.name} waits for the scheduler"
    found = _cannot_start(pod, now)
    if found is not None:
        return found
    if because in (Reason.RANK_LOST, Reason.RANK_FAILED):
        return because, f"{pod.name}: {why_unwired}. See kubectl logs {pod.name} -c {names.CONTAINER_ENGINE}."
    evidence = exit_evidence(pod)
    # Between two tries the kubelet says nothing but how the last one ended.
    stuck = _waiting(pod, _CRASH) or next((c for c in pod.containers if c.last_exit_code and not c.running), None)
    engine = next((c for c in pod.containers if c.name == names.CONTAINER_ENGINE), None)
    if stuck or (engine and engine.restarts and not engine.ready and evidence and not pod.containers_ready):
        which = stuck or engine or ContainerSeen(names.CONTAINER_ENGINE)
        if which.last_exit_reason in _NEVER_RAN:
            return (
                Reason.CANNOT_START,
                f"{pod.name} container {which.name} can not start: {_sentence(_runtime_says(which))} Check that "
                f"{_IMAGE_OF.get(which.name, 'its image')} is an image that holds this program.",
            )
        killed = which.last_exit_reason == "OOMKilled"
        happened = f"restarted {count(which.restarts, 'time')}" if which.restarts else "failed"
        hint = "Raise the memory limit, or lower what the container holds. " if killed else ""
        if which is engine and which.last_exit_code == 0:
            hint = "No error code: SGLang ends so when a process of it died, any engine when it is told to end. "
        again = " It is loading again." if which is engine and which.running else ""
        return (
            Reason.CRASHING,
            f"{pod.name} {happened}: {_sentence(evidence or 'exit code unknown')} "
            f"{hint}See kubectl logs {pod.name} -c {which.name} --previous.{again}",
        )
    if engine is None or not engine.running:
        return Reason.LAUNCHING, f"{pod.name} is starting its containers"
    if not engine.ready:
        if wired:
            return Reason.WIRED_BUT_FAILING, f"{pod.name} is wired, but its engine does not answer that it is ready"
        return Reason.LOADING, f"{pod.name}'s engine is loading"
    reason = because if because in _SAYS_MORE else Reason.WAITING_FOR_WIRING
    if managed and not wired:
        return reason, f"{pod.name}: {why_unwired or 'not wired to its peers yet'}"
    if not pod.containers_ready:
        return reason, f"{pod.name}'s sidecar is not ready yet: {why_unwired or 'wiring'}"
    return Reason.LAUNCHING, f"{pod.name} is about to become ready"


def _cannot_start(pod: PodSeen, now: float) -> tuple[Reason, str] | None:
    """An image, a volume or a configuration in the way; None where nothing is known to be."""
    stuck = _waiting(pod, _PULL)
    if stuck:
        return (
            Reason.CANNOT_PULL_IMAGE,
            f"{pod.name} can not pull the image of container {stuck.name}: {stuck.waiting_reason} "
            f"{_sentence(one_line(stuck.waiting_message, 600))} Check the image's name, that the nodes reach its "
            "registry, and template.imagePullSecrets.",
        )
    stuck = _waiting(pod, _CANNOT_START)
    if stuck:
        return (
            Reason.CANNOT_START,
            f"{pod.name} container {stuck.name} can not start: {stuck.waiting_reason} "
            f"{_sentence(one_line(stuck.waiting_message, 600))} See kubectl describe pod {pod.name}.",
        )
    if not not_starting(pod):
        return None
    warnings = tuple(
        (reason, message)
        for reason, message in pod.warnings or ()
        if reason not in _OF_RUNNING and (_NOT_SYNCED not in message or now - pod.created >= SYNC_SECONDS)
    )
    volume = next((m for r, m in warnings if r in _VOLUMES), "")
    if volume:
        return (
            Reason.CANNOT_MOUNT_VOLUME,
            f"{pod.name} can not mount a volume: {_sentence(one_line(volume, 600))} Create what is missing, or correct "
            "spec.model.volume or the role's template.volumes; the kubelet tries again by itself.",
        )
    if warnings:
        reason, message = warnings[0]
        return (
            Reason.CANNOT_START,
            f"{pod.name} can not start: {reason} {_sentence(one_line(message, 600))} See kubectl describe pod "
            f"{pod.name}.",
        )
    if now - pod.created >= STUCK_SECONDS and pod.warnings is None:
        return (
            Reason.CANNOT_START,
            f"{pod.name} was given to node {pod.node} and starts no container. Most often a volume is not there (a "
            "ConfigMap, Secret or claim that spec.model.volume or template.volumes names): see kubectl describe pod "
            f"{pod.name}.",
        )
    return None


def _runtime_says(container: ContainerSeen) -> str:
    """The container runtime's cause, without the chain of who passed it on."""
    return one_line(container.last_exit_message.rpartition("unable to start container process: ")[2], 600)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


_WORST = (
    Reason.CRASHING,
    Reason.CANNOT_START,
    Reason.CANNOT_MOUNT_VOLUME,
    Reason.CANNOT_PULL_IMAGE,
    Reason.CANNOT_SCHEDULE,
    Reason.RANK_FAILED,
    Reason.RANK_LOST,
    Reason.WIRED_BUT_FAILING,
    Reason.WRONG_CERTIFICATE,
    Reason.INVALID_CARD,
    Reason.STALE_REGISTRATION,
    Reason.OPERATOR_CANNOT_REACH_PODS,
    Reason.PEERS_REFUSED,
    Reason.PEERS_UNREACHABLE,
    Reason.WAITING_FOR_WIRING,
    Reason.LOADING,
    Reason.LAUNCHING,
)
_SAYS_MORE = frozenset(_WORST[_WORST.index(Reason.WRONG_CERTIFICATE) : _WORST.index(Reason.WAITING_FOR_WIRING)])


def worst(
    pods: Sequence[PodSeen],
    wired: frozenset[str],
    why: Mapping[str, tuple[Reason, str]],
    managed: bool,
    now: float = 0.0,
) -> tuple[Reason, str] | None:
    """What stands most in the way among these pods; None when all are ready."""
    found = []
    for p in pods:
        # A pod may still be Ready for the kubelet while its gate falls.
        if not p.ready or (managed and p.uid not in wired):
            because, text = why.get(p.uid, (None, ""))
            found.append(diagnose(p, p.uid in wired, text, managed, because, now))
    return min(found, key=lambda f: _WORST.index(f[0]), default=None)
