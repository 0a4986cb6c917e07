"""An engine that runs on without one of its ranks: told by name until it is started again, whoever looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from domain_told import told_of
from domain_world import World, ready_world

from pdoperator.domain.actions import EmitEvent, Memory, SetGate
from pdoperator.domain.decide import decide
from pdoperator.domain.lifecycle import exit_evidence
from pdoperator.domain.observed import ContainerSeen, Observed, PodSeen
from pdtransfer.contract.base import Role


def without_a_rank(w: World, *, started: float, engine_ready: bool = False, **pod_changes: Any) -> Observed:
    """What is seen when prefill, whose engine runs since `started`, shows no card of its last rank."""
    seen = w.observe()
    pod = next(p for p in seen.pods if p.role == Role.PREFILL.value)
    answer = seen.answers[pod.uid]
    assert answer.cards is not None and len(answer.cards.cards) == 2  # TP 2
    kept = replace(answer, cards=answer.cards.model_copy(update={"cards": answer.cards.cards[:1]}))

    def container(c: ContainerSeen) -> ContainerSeen:
        return replace(c, ready=engine_ready, started=started) if c.name == "engine" else replace(c, ready=False)

    hurt: PodSeen = replace(
        pod,
        containers=tuple(container(c) for c in pod.containers),
        ready=False,
        containers_ready=False,
        **pod_changes,
    )
    pods = tuple(hurt if p.uid == pod.uid else p for p in seen.pods)
    return replace(seen, pods=pods, answers={**seen.answers, pod.uid: kept})


def test_a_rank_that_is_gone_is_told_by_name_at_once() -> None:
    w = ready_world()
    prefill = w.side(Role.PREFILL)[0]
    seen = without_a_rank(w, started=prefill.gate_since - 5, engine_ready=True)
    for kind in ("Ready", "PrefillReady", "PeersWired"):
        status, reason, message = told_of(w, seen, kind)
        assert (status, reason) == ("False", "RankLost") and prefill.name in message, kind
    assert told_of(w, seen, "DecodeReady")[1] == "WaitingForWiring"
    actions = decide(seen, w.memory, w.settings).actions
    (gate,) = [a for a in actions if isinstance(a, SetGate) and a.uid == prefill.uid]
    assert (gate.status, gate.reason) == (False, "RankLost")
    assert ("Warning", "RankLost") in {(a.type, a.reason) for a in actions if isinstance(a, EmitEvent)}


def test_it_stays_told_until_the_engine_is_started_again_also_by_an_operator_that_knows_nothing() -> None:
    w = ready_world()
    prefill = w.side(Role.PREFILL)[0]
    fell: dict[str, Any] = {"kv_wired": "False", "kv_wired_since": w.now, "gate_reason": "RankLost"}
    still = without_a_rank(w, started=prefill.gate_since - 5, **fell)
    for memory in (w.memory, Memory()):
        assert told_of(w, still, "PrefillReady", memory)[1] == "RankLost"
    again = without_a_rank(w, started=w.now + 1, **fell)
    assert told_of(w, again, "PrefillReady")[1] == "Loading"


def test_an_engine_that_was_started_before_its_gate_fell_is_loading() -> None:
    w = ready_world()
    seen = without_a_rank(w, started=w.side(Role.PREFILL)[0].gate_since + 1)
    assert told_of(w, seen, "PrefillReady")[1] == "Loading"


def test_a_gate_that_fell_for_another_reason_names_no_lost_rank() -> None:
    w = ready_world()
    fell: dict[str, Any] = {"kv_wired": "False", "kv_wired_since": w.now, "gate_reason": "PeersUnreachable"}
    seen = without_a_rank(w, started=w.side(Role.PREFILL)[0].gate_since - 5, **fell)
    assert told_of(w, seen, "PrefillReady")[1] != "RankLost"


def test_an_engine_that_ends_without_an_error_code_says_why_it_may() -> None:
    w = ready_world()
    seen = w.observe()

    def ended(pod: PodSeen) -> PodSeen:
        engine = ContainerSeen("engine", running=True, restarts=1, last_exit_code=0, last_exit_reason="Completed")
        return replace(pod, ready=False, containers_ready=False, containers=(pod.containers[0], engine))

    pods = tuple(ended(p) if p.role == Role.PREFILL.value else p for p in seen.pods)
    _, reason, message = told_of(w, replace(seen, pods=pods), "PrefillReady")
    assert reason == "Crashing"
    assert "restarted 1 time: engine exited with 0 Completed. No error code: SGLang ends so when a process" in message
    assert message.endswith("--previous. It is loading again.")


@pytest.mark.parametrize(
    ("code", "says"),
    [(137, "engine exited with 137 (SIGKILL)"), (139, "engine exited with 139 (SIGSEGV)"),
     (1, "engine exited with 1"), (200, "engine exited with 200")],
)  # fmt: skip
def test_an_exit_code_names_the_signal_that_ended_the_engine(code: int, says: str) -> None:
    pod = ready_world().observe().pods[0]
    ended = ContainerSeen("engine", restarts=1, last_exit_code=code, last_exit_reason="Error")
    assert exit_evidence(replace(pod, containers=(ended,))) == says


@pytest.mark.parametrize(
    ("code", "line", "says"),
    [
        (137, 'INFO: "POST /generate HTTP/1.1" 200 OK', "engine exited with 137 (SIGKILL)"),
        (137, "memory cgroup out of memory", "engine exited with 137 (SIGKILL): memory cgroup out of memory"),
        (1, "bye", "engine exited with 1: bye"),
    ],
)
def test_an_ordinary_line_is_not_taken_for_the_reason_of_a_kill(code: int, line: str, says: str) -> None:
    pod = ready_world().observe().pods[0]
    ended = ContainerSeen("engine", restarts=1, last_exit_code=code, last_exit_reason="Error", last_exit_message=line)
    assert exit_evidence(replace(pod, containers=(ended,))) == says
