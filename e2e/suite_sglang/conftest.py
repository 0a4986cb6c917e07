"""Fixtures of the suite with real SGLang: one cluster, one operator, one model, one PDCluster at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.kit import cluster, install, requests, sglang, truth
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import wait_for
from e2e.kit.statuses import holds, statuses

NAMESPACE = os.environ.get("PDCLUSTER_E2E_NAMESPACE", "pdcluster-sglang")


@dataclass(frozen=True)
class Served:
    """A PDCluster of one prefill and one decode pod that was Ready, and what its model must answer."""

    name: str
    kubectl: Kubectl
    cases: list[truth.Expected]

    def pod(self, role: str) -> dict[str, Any]:
        """The pod of a role."""
        return sglang.engine_pod(self.kubectl, self.name, role)

    def ready(self) -> None:
        """Wait until it is Ready."""
        with statuses(self.kubectl, "pdcluster", self.name) as told:
            told.wait("it is Ready", lambda found: holds(found, "Ready"), timeout=sglang.READY_SECONDS)

    def exact(self, seconds: float = 240) -> None:
        """Every case is answered with the right tokens, through the router. A refusal is asked again: on busy cores an
        engine's health check may be late. Tokens are never asked again."""
        until = time.monotonic() + seconds
        with self.kubectl.forward(f"service/{self.name}-router", 30000) as port:
            for case in self.cases:
                while True:
                    answer = requests.generate(f"http://127.0.0.1:{port}", case.prompt, len(case.tokens), timeout=120)
                    if answer.status == 200 or time.monotonic() > until:
                        break
                    time.sleep(1)
                assert requests.wrong([(case, answer)]) == []


@pytest.fixture(scope="session")
def making(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Future[Path], Future[list[truth.Expected]]]]:
    """The model, then what it must answer: made while the cluster comes up."""
    folder = tmp_path_factory.mktemp("model")
    with ThreadPoolExecutor(1) as one_by_one:
        yield one_by_one.submit(sglang.make_model, folder), one_by_one.submit(_answers, folder)


def _answers(model: Path) -> list[truth.Expected]:
    """What `transformers` answers in one process, in float32: short prompts, and some of several prefill chunks."""
    short = truth.expected(model, prompts=3, length=48, new_tokens=12)
    return [*short, *truth.expected(model, prompts=2, length=150, new_tokens=8, seed=11)]


@pytest.fixture(scope="session")
def target(making: object) -> Iterator[Target]:
    """The cluster with the operator and SGLang's image. The embedded one is left up, as by e2e/suite."""
    found = cluster.up(sglang.environment() if cluster.given() is None else None)
    install.operator(found)
    yield found
    if not os.environ.get("PDCLUSTER_E2E_KEEP"):
        found.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def cases(making: tuple[Future[Path], Future[list[truth.Expected]]]) -> list[truth.Expected]:
    """Prompts and what is right."""
    return making[1].result(300)


@pytest.fixture(scope="session")
def kubectl(target: Target, making: tuple[Future[Path], object]) -> Iterator[Kubectl]:
    """kubectl in a namespace that holds the model. No pod is left in it."""
    install.namespace(target, NAMESPACE)
    found = target.kubectl.into(NAMESPACE)
    found.apply(install.model_config_map(making[0].result(300), files=sglang.MODEL_FILES))
    yield found
    if not os.environ.get("PDCLUSTER_E2E_KEEP"):
        wait_for("every pod is gone", lambda: not found.get("pods"), timeout=180, every=1)


@pytest.fixture(scope="session")
def plain(target: Target, kubectl: Kubectl) -> Iterator[str]:
    """A pod of SGLang that is not disaggregated. It loads while the first PDCluster's engines do."""
    kubectl.apply(sglang.plain_pod(target, "plain"))
    yield "plain"
    kubectl("delete", "pod", "plain", "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, target: Target, kubectl: Kubectl, cases: list[truth.Expected]
) -> Iterator[Served]:
    """A PDCluster with the TP sizes that the module names in TP (prefill's, decode's), Ready. It goes while the next
    one's engines are loading."""
    prefill, decode = request.module.TP
    name = f"sglang-{prefill}-{decode}"
    kubectl.apply(sglang.manifest(target, name, prefill_tp=prefill, decode_tp=decode))
    made = Served(name, kubectl, cases)
    try:
        made.ready()
        yield made
    finally:
        if not os.environ.get("PDCLUSTER_E2E_KEEP"):
            kubectl("delete", "pdcluster", name, "--ignore-not-found", "--wait=false")
