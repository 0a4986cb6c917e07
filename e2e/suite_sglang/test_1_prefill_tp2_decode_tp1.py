"""Prefill at TP 2, decode at TP 1: the image is SGLang's own, answers are exact, and each fault has a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.kit import broken, requests, sglang
from e2e.kit.cluster import Target
from e2e.kit.shell import wait_for
from e2e.kit.statuses import holds, statuses
from e2e.kit.watching import load
from e2e.suite_sglang.conftest import Served

TP = (2, 1)
pytestmark = [pytest.mark.timeout(3000), pytest.mark.usefixtures("plain")]


def test_the_image_is_sglangs_and_the_plugin_lies_beside_it(served: Served) -> None:
    for role, ranks in zip(("prefill", "decode"), TP, strict=True):
        pod = served.pod(role)["metadata"]["name"]
        kubectl = served.kubectl
        # Without the launcher's path the image knows nothing of this project ...
        absent = "import importlib.util as u; print([n for n in ('pdtransfer', 'pdoperator') if u.find_spec(n)])"
        assert json.loads(sglang.inside(kubectl, pod, absent).replace("'", '"')) == []
        # ... and no rank can change what the launcher gave it.
        assert "Read-only file system" in kubectl(
            "exec", pod, "-c", "engine", "--", "touch", "/opt/pdtransfer/plugin/x", check=False
        )
        found = sglang.processes(kubectl, pod, "sglang::scheduler")
        assert len(found) == ranks
        own = f"/host{sglang.environment()}/lib/"
        for pid in found:
            files = sglang.mapped(kubectl, pod, pid)
            for library in ("libnixl.so", "libtorch_cpu.so"):
                (path,) = {f for f in files if f.rpartition("/")[2].startswith(library)}
                assert own.removeprefix("/host") in path


def test_answers_equal_those_of_transformers_in_float32(served: Served) -> None:
    served.exact()


def test_sglang_that_is_not_disaggregated_answers_the_same(served: Served, plain: str) -> None:
    """At TP 1, as this decode, with the same image. In float32 with sure margins (e2e.kit.truth) any TP answers so."""
    kubectl = served.kubectl
    with statuses(kubectl, "pod", plain) as seen:
        seen.wait("it is Ready", lambda pod: holds(pod, "Ready"), timeout=sglang.READY_SECONDS)
    with kubectl.forward(f"pod/{plain}", 30000) as port:
        assert requests.wrong(requests.compare(f"http://127.0.0.1:{port}", served.cases)) == []
    kubectl("delete", "pod", plain, "--wait=false")


def test_describe_tells_what_runs(served: Served) -> None:
    found = served.kubectl.get("pdcluster", served.name)
    conditions = {c["type"]: c for c in found["status"]["conditions"]}
    assert {t for t, c in conditions.items() if c["status"] == "True"} >= {
        "Ready", "Compatible", "PrefillReady", "DecodeReady", "PeersWired", "KVTransferVerified", "RouterReady",
    }  # fmt: skip
    assert found["status"]["verification"]["bytes"] > 0
    for role, ranks in zip(("prefill", "decode"), TP, strict=True):
        engine = found["status"][role]["engine"]
        # As the running ranks report it: what COMMON_ARGS ask for.
        assert set(engine["observed"]) >= {"maxTotalTokens", "attentionTensorParallelSize", "pageSize", "kvCacheDtype"}
        told = (engine["settings"][name] for name in engine["observed"])
        assert {"4096", str(ranks), str(sglang.PAGE), "float32"} <= set(told)


@contextmanager
def _under_way(served: Served) -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any]], str]]:
    """A request that decode computes for, for a while (the model's context is 2048 tokens): its first event, the rest
    of them, and decode's own address. The client hangs up when the block ends."""
    case, kubectl = served.cases[0], served.kubectl
    decode = served.pod("decode")["metadata"]["name"]
    with (
        kubectl.forward(f"service/{served.name}-router", 30000) as router,
        kubectl.forward(f"pod/{decode}", 30000) as port,
        requests.streamed(f"http://127.0.0.1:{router}", case.prompt, 1900) as events,
    ):
        first = next(events)
        assert first["output_ids"] == list(case.tokens)[: len(first["output_ids"])]
        assert first["meta_info"]["finish_reason"] is None
        base = f"http://127.0.0.1:{port}"
        wait_for("decode computes for it", lambda: "num_running_reqs" in sglang.load(base), timeout=60, every=0.1)
        yield first, events, base


def _idle(served: Served) -> None:
    """Neither engine holds anything of a request."""
    for role in ("decode", "prefill"):
        with served.kubectl.forward(f"pod/{served.pod(role)['metadata']['name']}", 30000) as port:
            sglang.await_idle(f"http://127.0.0.1:{port}")


def test_a_client_that_hangs_up_ends_its_request_and_the_next_is_served(served: Served) -> None:
    with statuses(served.kubectl, "pdcluster", served.name) as told:
        with _under_way(served):
            pass
        _idle(served)
        served.exact()
        # It is nobody's fault: the operator told nothing else all the time.
        assert {(c["status"], c["reason"]) for c in told.conditions("Ready")} == {("True", "AllReady")}


def test_an_aborted_request_ends_as_aborted_and_the_next_is_served(served: Served) -> None:
    with statuses(served.kubectl, "pdcluster", served.name) as told:
        with _under_way(served) as (first, events, decode):
            assert requests.post(f"{decode}/abort_request", {"rid": first["meta_info"]["id"]}) == 200
            *_, last = events
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(last["output_ids"]) < 1900
        _idle(served)
        served.exact()
        assert {(c["status"], c["reason"]) for c in told.conditions("Ready")} == {("True", "AllReady")}


def _break(served: Served, role: str, harm: Callable[[str], None]) -> set[str]:
    """Harm the pod of a role while clients ask, and wait until it is wired and serves again. Gives the reasons that
    Ready had meanwhile. The pod stays the same one, with the same address; every client gets an answer, and none a
    wrong token."""
    kubectl = served.kubectl
    before = served.pod(role)
    name, started = before["metadata"]["name"], sglang.restarts(before)
    with (
        kubectl.forward(f"service/{served.name}-router", 30000) as port,
        load(f"http://127.0.0.1:{port}", served.cases, pause=0.5) as history,
        statuses(kubectl, "pdcluster", served.name) as told,
        statuses(kubectl, "pod", name) as seen,
    ):
        wait_for("traffic before the fault", lambda: history.succeeded >= 2, timeout=120)
        harm(name)
        wait_for("Ready told of it", lambda: told.reasons("Ready"), timeout=300)
        seen.wait("its engine was started again", lambda pod: sglang.restarts(pod) > started, timeout=300)
        seen.wait("it is Ready", lambda pod: holds(pod, "Ready"), timeout=sglang.READY_SECONDS)
        told.wait("it is Ready", lambda cluster: holds(cluster, "Ready"), timeout=120)
        answered = history.succeeded
        wait_for("traffic after the fault", lambda: history.succeeded >= answered + 3, timeout=120)
        reasons = told.reasons("Ready")
    assert history.wrong_tokens == []
    assert history.unanswered == []
    after = served.pod(role)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["podIP"] == before["status"]["podIP"]
    return reasons


def _replaced(served: Served) -> int:
    """How often the operator told that a pod's ranks are new ones."""
    events = served.kubectl.get("events")
    told = [e for e in events if e["reason"] == "PeerReplaced" and e["involvedObject"]["name"] == served.name]
    return sum(e.get("count") or e.get("series", {}).get("count") or 1 for e in told)


def test_a_killed_scheduler_is_told_and_its_engine_comes_back(served: Served) -> None:
    before = _replaced(served)

    def harm(pod: str) -> None:
        sglang.kill(served.kubectl, pod, sglang.processes(served.kubectl, pod, "sglang::scheduler")[-1])

    assert "Crashing" in _break(served, "prefill", harm)
    assert _replaced(served) > before
    served.exact()


def test_decode_restarted_at_its_address_is_a_new_peer(served: Served, target: Target) -> None:
    before = _replaced(served)

    def harm(pod: str) -> None:
        if target.embedded:
            broken.kill_from_outside(pod, "sglang.launch_server")
        else:
            sglang.inside(served.kubectl, pod, "import os, signal; os.kill(1, signal.SIGTERM)")

    assert "Crashing" in _break(served, "decode", harm)
    assert _replaced(served) > before
    served.exact()
