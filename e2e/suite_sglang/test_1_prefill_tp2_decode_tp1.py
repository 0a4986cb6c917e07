"""Prefill at TP 2, decode at TP 1: the image is SGLang's own, answers are exact, and each fault has a name."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from e2e.kit import sglang
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import wait_for
from e2e.kit.watching import load
from e2e.suite_sglang.conftest import Served

TP = (2, 1)
pytestmark = pytest.mark.timeout(3000)


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


def test_answers_equal_the_run_that_is_not_disaggregated(served: Served) -> None:
    served.exact()


def test_describe_tells_what_runs(served: Served) -> None:
    found = served.kubectl.get("pdcluster", served.name)
    conditions = {c["type"]: c for c in found["status"]["conditions"]}
    assert {t for t, c in conditions.items() if c["status"] == "True"} >= {
        "Ready", "Compatible", "PrefillReady", "DecodeReady", "PeersWired", "KVTransferVerified", "RouterReady",
    }  # fmt: skip
    assert found["status"]["verification"]["bytes"] > 0


def _base(kubectl: Kubectl, pod: dict[str, Any], path: str) -> Any:
    """What the engine of a pod answers to a GET."""
    code = (
        "import sys, urllib.request; "
        "print(urllib.request.urlopen(f'http://127.0.0.1:30000{sys.argv[1]}', timeout=20).read().decode())"
    )
    return json.loads(sglang.inside(kubectl, pod["metadata"]["name"], code, path))


def _running(served: Served) -> int:
    """Requests that decode computes for right now."""
    return int(_base(served.kubectl, served.pod("decode"), "/v1/loads")["loads"][0]["num_running_reqs"])


def test_a_client_that_hangs_up_ends_its_request_and_the_next_is_served(served: Served) -> None:
    prompt = list(served.cases[0].prompt)
    with served.kubectl.forward(f"service/{served.name}-router", 30000) as port:
        body = {
            "input_ids": prompt,
            "stream": True,  # the model's context is 2048 tokens: it goes on for a while
            "sampling_params": {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            first = json.loads(answer.readline().removeprefix(b"data: "))
            assert first["output_ids"] == list(served.cases[0].tokens)[: len(first["output_ids"])]
            wait_for("decode computes for it", lambda: _running(served) == 1, timeout=60)
        # The connection is closed by now.
        wait_for("decode stopped computing for nobody", lambda: _running(served) == 0, timeout=60)
    served.exact()


def _break(served: Served, role: str, harm: Callable[[str], None]) -> set[str]:
    """Harm the pod of a role while clients ask, and wait until it is wired and serves again. Gives the reasons that
    Ready had meanwhile. The pod stays the same one, with the same address, and no client gets a wrong token."""
    kubectl = served.kubectl
    before = served.pod(role)
    name, started = before["metadata"]["name"], sglang.restarts(before)
    reasons: set[str] = set()

    def restarted() -> bool:
        ready = served.condition("Ready")
        if ready.get("status") != "True":
            reasons.add(ready["reason"])
        return sglang.restarts(served.pod(role)) > started

    def recovered() -> bool:
        restarted()
        return served.condition("Ready").get("status") == "True" and _ready(served.pod(role))

    with (
        kubectl.forward(f"service/{served.name}-router", 30000) as port,
        load(f"http://127.0.0.1:{port}", served.cases) as history,
    ):
        wait_for("traffic before the fault", lambda: history.succeeded >= 2, timeout=120)
        harm(name)
        wait_for(f"the engine of {name} was started again", restarted, timeout=300, every=0.2)
        wait_for(
            f"{name} is wired again",
            recovered,
            timeout=sglang.READY_SECONDS,
            every=0.5,
            context=lambda: kubectl("describe", "pdcluster", served.name, check=False)[-4000:],
        )
        answered = history.succeeded
        wait_for("traffic after the fault", lambda: history.succeeded >= answered + 3, timeout=120)
    assert history.wrong_tokens == []
    after = served.pod(role)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["podIP"] == before["status"]["podIP"]
    return reasons


def _ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def _replaced(served: Served) -> int:
    """How often the operator told that a pod's ranks are new ones."""
    events = served.kubectl.get("events")
    told = [e for e in events if e["reason"] == "PeerReplaced" and e["involvedObject"]["name"] == served.name]
    return sum(e.get("count") or e.get("series", {}).get("count") or 1 for e in told)


def test_a_killed_scheduler_is_told_and_its_engine_comes_back(served: Served) -> None:
    before = _replaced(served)

    def harm(pod: str) -> None:
        sglang.kill(served.kubectl, pod, sglang.processes(served.kubectl, pod, "sglang::scheduler")[-1])

    reasons = _break(served, "prefill", harm)
    assert "Crashing" in reasons
    assert _replaced(served) > before
    served.exact()


def test_decode_restarted_at_its_address_is_a_new_peer(served: Served) -> None:
    before = _replaced(served)

    def harm(pod: str) -> None:
        sglang.inside(served.kubectl, pod, "import os, signal; os.kill(1, signal.SIGTERM)")

    reasons = _break(served, "decode", harm)
    assert reasons, "Ready never was anything but True"
    assert _replaced(served) > before
    served.exact()
