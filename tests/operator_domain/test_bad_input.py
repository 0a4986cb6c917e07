"""What a person woken at night reads: causes named, the first broken pair told, last words kept and cleaned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from domain_makers import quickstart
from domain_world import World
from hypothesis import given
from hypothesis import strategies as st

from pdoperator.api.conditions import Reason
from pdoperator.domain.actions import CreatePod, EmitEvent, IssueCertificate
from pdoperator.domain.decide import decide
from pdoperator.domain.lastwords import LIMIT, last_words, one_line
from pdoperator.domain.lifecycle import exit_evidence
from pdoperator.domain.observed import ContainerSeen, Observed, PodAnswer, PodSeen
from pdoperator.domain.poddiagnosis import STUCK_SECONDS, diagnose, not_starting
from pdoperator.domain.words import count, rate
from pdtransfer.contract.verdict import VerdictState

# Last words.

TRACEBACK = """\x1b[31mLoading weights:  40%|####      | 2/5\x1b[0m
Traceback (most recent call last):
  File "/opt/engine/run.py", line 12, in <module>
    main()
    ^^^^^^
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ("\n \n---\n", ""),
        ("model folder /m is not there\n", "model folder /m is not there"),
        (TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("usage: engine [-h]\n    [--port PORT]\nengine: error: unrecognized arguments: --x\n",
         "engine: error: unrecognized arguments: --x"),
        # The error is above what the shutdown says.
        ("ValueError: bad page size 3\nINFO stopping workers\nINFO bye\n", "ValueError: bad page size 3"),
        ("starting\nserving on 30000\n", "serving on 30000"),
        ("2026-11-29 16:20:46,745 leader CRITICAL no start\n", "leader CRITICAL no start"),
        ("[2026-11-29T16:20:46Z] rank failed\n", "rank failed"),
        ("10%\r50%\rbroken: cannot read shard 3\r\n", "broken: cannot read shard 3"),
    ],
)  # fmt: skip
def test_the_line_that_matters_is_found(log: str, said: str) -> None:
    assert last_words(log) == said


@pytest.mark.parametrize(
    "log",
    [
        "error: HF_TOKEN=hf_abcdefSECRETghij is invalid",
        "error: Authorization: Bearer SECRETSECRET was refused",
        'error: {"api_key": "SECRETSECRET"} was refused',
        "error: cannot clone https://me:SECRETSECRET@host/repo",
        "error: --password=SECRETSECRET is wrong",
        "error: token eyJSECRETSECRETSECRET.SECRETSECRETSECRET.x refused",
    ],
)
def test_what_looks_like_a_credential_is_left_out(log: str) -> None:
    assert "SECRET" not in last_words(log)
    assert "SECRET" not in one_line(log)
    assert last_words(log).startswith("error: ")


@given(st.text(max_size=3000), st.integers(min_value=10, max_value=400))
def test_any_log_gives_one_bounded_printable_line(log: str, limit: int) -> None:
    for said in (last_words(log, limit), one_line(log, limit)):
        assert len(said) <= limit
        assert said == said.strip()
        assert not any(c in said for c in "\n\r\t\x1b\x00")


def test_a_pods_evidence_carries_the_containers_last_words() -> None:
    log = "x\n" * 900 + "error: no weights\n"
    ended = ContainerSeen("engine", last_exit_code=2, last_exit_reason="Error", last_exit_message=log, restarts=1)
    pod = seen(containers=(ended,))
    assert exit_evidence(pod) == "engine exited with 2: error: no weights"
    killed = replace(pod.containers[0], last_exit_code=137, last_exit_reason="OOMKilled", last_exit_message="")
    assert exit_evidence(replace(pod, containers=(killed,))) == "engine exited with 137 OOMKilled"
    assert len(exit_evidence(replace(pod, containers=(replace(killed, last_exit_message="e" * 9999),)))) < LIMIT + 60


# Numbers.


@pytest.mark.parametrize(
    ("bytes_per_second", "text"),
    [
        (0.0, "0 B/s"), (512.4, "512 B/s"), (7_019_441, "7.02 MB/s"), (410e6, "410 MB/s"), (39.1e9, "39.1 GB/s"),
        (999.6e6, "1.00 GB/s"), (9.996e6, "10.0 MB/s"), (99.96e6, "100 MB/s"), (2_500, "2.50 kB/s"),
        (1.2e12, "1200 GB/s"),
    ],
)  # fmt: skip
def test_a_rate_keeps_three_digits_in_the_unit_that_shows_them(bytes_per_second: float, text: str) -> None:
    assert rate(bytes_per_second) == text


@given(st.floats(min_value=0.5, max_value=1e12))
def test_a_rate_that_is_not_zero_is_never_printed_as_zero_and_is_right_within_a_percent(value: float) -> None:
    number, unit = rate(value).split()
    printed = float(number) * {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}[unit]
    assert printed == pytest.approx(value, rel=0.01, abs=0.5)
    assert unit != "B/s" or value < 1000


def test_counts_are_spelt() -> None:
    assert [count(n, "pair") for n in (0, 1, 2)] == ["0 pairs", "1 pair", "2 pairs"]


# Pods that start nothing.


def seen(**changes: Any) -> PodSeen:
    base = PodSeen(
        name="c-prefill-0", uid="u", role="prefill", replica=0, revision="r", attempt=0, phase="Pending",
        deleting=False, node="n1", ip="", ready=False, containers_ready=False, scheduled=True, unschedulable_message="",
        kv_wired="", kv_wired_since=0.0, created=1000.0,
        containers=(ContainerSeen("pdtransfer", waiting_reason="PodInitializing"),
                    ContainerSeen("engine", waiting_reason="PodInitializing")),
    )  # fmt: skip
    return replace(base, **changes)


SYNC = ("FailedMount", 'MountVolume.SetUp failed for volume "model" : failed to sync configmap cache: timed out')
MOUNT = ("FailedMount", 'MountVolume.SetUp failed for volume "model" : configmap "gone" not found')


@pytest.mark.parametrize(
    ("warnings", "age", "reason", "says"),
    [
        ((MOUNT,), 12.0, Reason.CANNOT_MOUNT_VOLUME, ['configmap "gone" not found. Create', "spec.model.volume"]),
        # A sandbox that failed once meanwhile does not hide the volume.
        ((("FailedCreatePodSandBox", "cni"), MOUNT), 12.0, Reason.CANNOT_MOUNT_VOLUME, ["gone"]),
        ((("FailedCreatePodSandBox", "cni: no address left"),), 12.0, Reason.CANNOT_START, ["no address left"]),
        ((SYNC,), 30.0, Reason.LAUNCHING, ["starting its containers"]),
        ((SYNC, MOUNT), 30.0, Reason.CANNOT_MOUNT_VOLUME, ["gone"]),
        # Only what runs is probed: this look at the pod is the older one.
        ((("Unhealthy", "Readiness probe failed: refused"),), 12.0, Reason.LAUNCHING, ["starting its containers"]),
        ((("Unhealthy", "Readiness probe failed"), MOUNT), 12.0, Reason.CANNOT_MOUNT_VOLUME, ["gone"]),
        ((SYNC,), 61.0, Reason.CANNOT_MOUNT_VOLUME, ["failed to sync configmap cache"]),
        ((), STUCK_SECONDS + 1, Reason.LAUNCHING, ["starting its containers"]),  # events were read: an image is pulled
        (None, STUCK_SECONDS - 1, Reason.LAUNCHING, ["starting its containers"]),
        (None, STUCK_SECONDS + 1, Reason.CANNOT_START, ["node n1", "kubectl describe pod c-prefill-0", "ConfigMap"]),
    ],
)
def test_a_pod_that_starts_no_container_says_why_or_where_to_look(
    warnings: tuple[tuple[str, str], ...] | None, age: float, reason: Reason, says: list[str]
) -> None:
    found, message = diagnose(seen(warnings=warnings), False, "", True, None, 1000.0 + age)
    assert found is reason
    for words in says:
        assert words in message


def test_a_program_that_an_image_does_not_hold_is_no_crash_and_too_little_memory_says_what_to_raise() -> None:
    runtime = (
        "failed to create containerd task: runc create failed: unable to start container process: "
        'exec: "pdtransfer-sidecar": executable file not found in $PATH: unknown'
    )
    sidecar = ContainerSeen("pdtransfer", waiting_reason="CrashLoopBackOff", restarts=2, last_exit_code=128,
                            last_exit_reason="StartError", last_exit_message=runtime)  # fmt: skip
    reason, message = diagnose(seen(containers=(sidecar,)), False, "", True)
    assert reason is Reason.CANNOT_START
    assert message == (
        'c-prefill-0 container pdtransfer can not start: exec: "pdtransfer-sidecar": executable file not found in '
        "$PATH: unknown. Check that spec.transfer.image is an image that holds this program."
    )
    between = replace(sidecar, waiting_reason="")
    assert diagnose(seen(containers=(between,)), False, "", True) == (reason, message)
    engine = ContainerSeen("engine", waiting_reason="CrashLoopBackOff", restarts=1, last_exit_code=137,
                           last_exit_reason="OOMKilled")  # fmt: skip
    reason, message = diagnose(seen(containers=(engine,)), False, "", True)
    assert reason is Reason.CRASHING
    assert "restarted 1 time: engine exited with 137 OOMKilled. Raise the memory limit" in message
    first = replace(engine, restarts=0, waiting_reason="", last_exit_code=78, last_exit_reason="Error")
    _, message = diagnose(seen(containers=(first,)), False, "", True)
    assert message.startswith("c-prefill-0 failed: engine exited with 78. See kubectl logs")


def test_events_are_read_only_for_pods_of_which_nothing_else_tells() -> None:
    assert not_starting(seen())
    assert not not_starting(seen(node=""))
    assert not not_starting(seen(deleting=True))
    assert not not_starting(seen(containers=(ContainerSeen("pdtransfer", running=True),)))
    assert not not_starting(seen(containers=(ContainerSeen("engine", waiting_reason="ImagePullBackOff"),)))


# The whole decision.


def small() -> World:
    return World(quickstart(prefill__tensorParallelSize=1, decode__replicas=1, router={"type": "None"}))


def wired() -> World:
    w = small()
    for _ in range(8):
        w.step()
    assert w.condition("Ready")["status"] == "True"
    return w


def decide_once(w: World, observed: Observed) -> list[Any]:
    decision = decide(observed, w.memory, w.settings)
    w.act(decision)
    return list(decision.actions)


def told(w: World, state: VerdictState, reason: str, message: str) -> Observed:
    """What is seen when decode's rank says this of prefill."""
    observed = w.observe()
    answers = dict(observed.answers)
    for uid, answer in answers.items():
        if answer.cards is not None and answer.cards.role.value == "decode" and answer.verdicts is not None:
            verdicts = tuple(
                v.model_copy(update={"state": state, "reason": reason, "message": message, "at": w.now + 1})
                for v in answer.verdicts.verdicts
            )
            answers[uid] = replace(answer, verdicts=answer.verdicts.model_copy(update={"verdicts": verdicts}))
    pods = tuple(replace(p, containers_ready=False, ready=False) for p in observed.pods)
    return replace(observed, answers=answers, pods=pods)


@pytest.mark.parametrize(
    ("state", "verdict", "reason", "todo"),
    [
        (VerdictState.UNREACHABLE, "TLSFailed", "PeersUnreachable", "delete the pod"),
        (VerdictState.UNREACHABLE, "PeerUnreachable", "PeersUnreachable", "NetworkPolicy"),
        (VerdictState.REFUSED, "LayoutMismatch", "PeersRefused", "same model"),
        (VerdictState.REFUSED, "ChecksumMismatch", "PeersRefused", "NIC"),
    ],
)
def test_the_first_broken_pair_is_named_with_the_ranks_own_reason(
    state: VerdictState, verdict: str, reason: str, todo: str
) -> None:
    w = wired()
    decide_once(w, told(w, state, verdict, "alert unknown ca"))
    c = w.condition("PeersWired")
    assert (c["status"], c["reason"]) == ("False", reason)
    prefill, decode = (next(p.name for p in w.pods.values() if p.role.value == r) for r in ("prefill", "decode"))
    assert f"{prefill} rank 0 and {decode} rank 0: {verdict}: alert unknown ca" in c["message"]
    assert todo in c["message"]
    assert w.condition("Ready")["reason"] == reason


@pytest.mark.parametrize("reason", ["InvalidCard", "WrongCertificate", "OperatorCannotReachPods"])
def test_a_pod_whose_answer_can_not_be_used_is_named_in_every_condition_it_fails(reason: str) -> None:
    w = small()
    w.step()
    w.step()
    observed = w.observe()
    decode = next(p for p in observed.pods if p.role == "decode")
    up = (ContainerSeen("pdtransfer", running=True), ContainerSeen("engine", running=True, ready=True))
    pods = tuple(replace(p, containers=up) if p is decode else p for p in observed.pods)
    answers = observed.answers | {decode.uid: PodAnswer(error=reason, message="cards.0: fingerprint 0 does not match")}
    decide_once(w, replace(observed, pods=pods, answers=answers))
    for kind in ("PeersWired", "DecodeReady", "Ready"):
        c = w.condition(kind)
        assert c["reason"] == reason, kind
        assert decode.name in c["message"] and "fingerprint 0 does not match" in c["message"]


def test_a_sidecar_that_has_only_just_started_is_no_news() -> None:
    w = small()
    w.step()
    observed = w.observe()
    pods = tuple(
        replace(p, containers=(ContainerSeen("pdtransfer", running=True), ContainerSeen("engine", running=True)))
        for p in observed.pods
    )
    silent = {p.uid: PodAnswer(error="OperatorCannotReachPods", message="connection refused") for p in pods}
    decide_once(w, replace(observed, pods=pods, answers=silent))
    assert w.condition("PeersWired")["reason"] == "Wiring"
    assert w.condition("Ready")["reason"] == "Loading"


def test_roles_that_serve_different_models_are_told_apart_with_the_fields() -> None:
    w = small()
    w.step()
    for pod in w.pods.values():
        if pod.role.value == "decode":
            pod.model = "other"
    for _ in range(6):
        w.step()
    c = w.condition("PeersWired")
    assert (c["status"], c["reason"]) == ("False", "PeersRefused")
    assert "FingerprintMismatch" in c["message"] and "model name (tiny and other)" in c["message"]


def test_an_overwritten_certificate_is_issued_again_but_not_in_a_loop() -> None:
    w = wired()
    observed = w.observe()
    (uid,) = [u for u, a in observed.answers.items() if a.cards is not None and a.cards.role.value == "decode"]

    def look(seconds: float) -> int:
        w.now += seconds
        bad = {uid: PodAnswer(error="WrongCertificate", message="self-signed", at=w.now)}
        now = replace(w.observe(), answers=w.observe().answers | bad)
        return sum(isinstance(a, IssueCertificate) for a in decide_once(w, now))

    pause = w.settings.certificate_rewrite_seconds
    assert [look(1), look(1), look(pause - 3), look(pause + 1)] == [1, 0, 0, 1]


def test_a_namespace_that_goes_away_is_left_alone() -> None:
    w = small()
    w.api_error_reason, w.api_error = "NamespaceTerminating", "create Pod: 403 Forbidden: being terminated"
    assert decide_once(w, w.observe()) == []
    w.api_error_reason = w.api_error = ""
    assert any(isinstance(a, CreatePod) for a in decide_once(w, w.observe()))


def test_a_refusal_by_quota_is_no_missing_right() -> None:
    w = small()
    w.api_error_reason, w.api_error = "AdmissionRefused", "create Pod x: 403 Forbidden: exceeded quota: compute"
    w.step()
    c = w.condition("Ready")
    assert (c["status"], c["reason"]) == ("False", "AdmissionRefused")
    assert "exceeded quota" in c["message"] and "ClusterRole" not in c["message"]
    assert "Raise the quota" in c["message"]


def test_a_tcp_fabric_that_was_asked_for_is_told_once() -> None:
    w = wired()
    assert w.condition("Compatible")["reason"] == "Fits"
    assert "warnings" not in w.status
    assert w.condition("FabricReady")["reason"] == "TCPRequested"


def test_an_unreadable_spec_without_pods_claims_nothing_to_be_ready() -> None:
    w = World({"engine": {"type": "Later"}})
    w.step()
    assert {k: w.condition(k)["status"] for k in ("PrefillReady", "DecodeReady", "PeersWired")} == {
        "PrefillReady": "Unknown", "DecodeReady": "Unknown", "PeersWired": "Unknown",
    }  # fmt: skip
    assert w.condition("Ready")["reason"] == "InvalidSpec"
    assert all(e.reason == "Refused" for e in w.events if isinstance(e, EmitEvent))
