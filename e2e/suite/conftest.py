"""Fixtures of the end-to-end suite: one cluster, one operator, one model, one quickstart PDCluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.kit import cluster, install, truth
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl

SECONDS = 1800
"""A test's time with that of its fixtures: the first one starts the cluster, on a new machine after installing its
programs. Every wait has a deadline of its own, which names what it waited for."""
NAMESPACE = os.environ.get("PDCLUSTER_E2E_NAMESPACE", "pdcluster-e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(SECONDS))


@dataclass(frozen=True)
class Model:
    """The checkpoint's folder and what it must answer."""

    folder: Path
    cases: list[truth.Expected]


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """The cluster with the operator installed. The embedded one is left up: .ci/run and `make cluster-down`
    remove it. PDCLUSTER_E2E_KEEP=1 keeps the suite's namespace too."""
    found = cluster.up()
    install.operator(found)
    yield found
    if not os.environ.get("PDCLUSTER_E2E_KEEP"):
        found.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = install.make_model(tmp_path_factory.mktemp("model"))
    return Model(folder, truth.expected(folder, prompts=4, length=48, new_tokens=12))


@pytest.fixture(scope="session")
def kubectl(target: Target, model: Model) -> Kubectl:
    """kubectl in a namespace that holds the model."""
    install.namespace(target, NAMESPACE)
    found = target.kubectl.into(NAMESPACE)
    found.apply(install.model_config_map(model.folder))
    return found


@pytest.fixture(scope="session")
def quickstart(target: Target, kubectl: Kubectl) -> str:
    """The quickstart PDCluster, Ready."""
    manifest = install.example("quickstart", target.image)
    kubectl.apply(manifest)
    name: str = manifest["metadata"]["name"]
    kubectl.wait_condition("pdcluster", name, "Ready", timeout=300)
    return name
