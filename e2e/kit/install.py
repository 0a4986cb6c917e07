"""Installing the operator with its chart, and delivering the demo's model as a ConfigMap."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import ROOT, CommandFailed, run, wait_for

SYSTEM = "pdcluster-system"
RELEASE = "pdcluster"
CRD = "pdclusters.pdcluster.io"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
CONFIGMAP_LIMIT = 1 << 20
"""Bytes of all values (before base64): the API server's limit for one ConfigMap."""


def operator(target: Target) -> None:
    """`helm upgrade --install`, and wait until the operator is available. A failure shows what its pod says."""
    _clear_interrupted(target)
    repository, _, tag = target.image.rpartition(":")
    done = run(
        [
            target.helm, "--kubeconfig", target.kubectl.kubeconfig, "upgrade", "--install", RELEASE,
            str(ROOT / "charts" / "pdcluster"), "--namespace", SYSTEM, "--create-namespace",
            "--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}",
            "--set", f"defaults.transferImage={target.image}", "--set", f"defaults.routerImage={target.image}",
            "--wait", "--timeout", "180s",
        ],
        timeout=240,
        check=False,
    )  # fmt: skip
    if done.returncode:
        pods = target.kubectl.into(SYSTEM)("describe", "pods", check=False)
        raise CommandFailed(f"helm upgrade --install: {done.stderr}\n{pods[-3000:]}\n{operator_logs(target)}")


def _clear_interrupted(target: Target) -> None:
    """Take away a release whose install or upgrade was cut off (Ctrl-C in a demo): helm would refuse every
    further one. PDClusters and the CRD stay."""
    found = run(
        [target.helm, "--kubeconfig", target.kubectl.kubeconfig, "status", RELEASE,
         "--namespace", SYSTEM, "--output", "json"],
        check=False,
    )  # fmt: skip
    if found.returncode == 0 and str(json.loads(found.stdout)["info"]["status"]).startswith("pending-"):
        uninstall(target)


def elsewhere(kubectl: Kubectl, namespace: str) -> list[str]:
    """PDClusters that live in other namespaces, as NAMESPACE/NAME."""
    if not kubectl.get("crd", CRD):
        return []
    path = "jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name} {end}"
    names = kubectl("get", "pdclusters", "--all-namespaces", "-o", path)
    return [name for name in names.split() if not name.startswith(f"{namespace}/")]


def uninstall(target: Target) -> None:
    """`helm uninstall`; the CRD and the PDClusters stay, as the chart says."""
    run(
        [target.helm, "--kubeconfig", target.kubectl.kubeconfig, "uninstall", RELEASE, "--namespace", SYSTEM,
         "--ignore-not-found", "--wait", "--timeout", "180s"],
        timeout=240,
    )  # fmt: skip


def namespace(target: Target, name: str) -> None:
    """Make sure the namespace exists."""
    target.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def remove_namespace(target: Target, name: str, *, timeout: float = 120) -> None:
    """Delete the namespace and wait until it is gone."""
    target.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
    wait_for(
        f"namespace {name} is gone",
        lambda: target.kubectl.get("namespace", name) is None,
        timeout=timeout,
        context=lambda: str(target.kubectl.into(name).get("pods")),
    )


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny float32 Llama with random weights and a tokenizer, made on the spot."""
    run(
        [sys.executable, "-m", "pdtransfer.engines.reference.tiny_model", str(folder), "--seed", str(seed)],
        timeout=300,
    )
    return folder


def model_config_map(folder: Path, name: str = "tiny-llama", files: tuple[str, ...] = MODEL_FILES) -> dict[str, Any]:
    """The checkpoint as a ConfigMap: the one volume that works on any cluster without a registry."""
    data = {f: (folder / f).read_bytes() for f in files}
    size = sum(len(b) for b in data.values())
    if size > CONFIGMAP_LIMIT:
        raise ValueError(f"the model takes {size} bytes in a ConfigMap, the limit is {CONFIGMAP_LIMIT}")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "binaryData": {f: base64.b64encode(b).decode() for f, b in data.items()},
    }


def example(name: str, image: str) -> dict[str, Any]:
    """examples/NAME.yaml with its image replaced by the one this cluster can run."""
    manifest: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    manifest["metadata"].pop("namespace", None)
    spec = manifest["spec"]
    spec["engine"]["image"] = image
    for section in ("transfer", "router"):
        if section in spec and "image" in spec[section]:
            spec[section]["image"] = image
    return manifest


def temporary_model() -> tempfile.TemporaryDirectory[str]:
    """A folder for `make_model` that goes away by itself."""
    return tempfile.TemporaryDirectory(prefix="pdcluster-model-")


def operator_logs(target: Target, lines: int = 60) -> str:
    """The operator's last lines, for a failure's context."""
    return target.kubectl.into(SYSTEM)("logs", "deployment/pdcluster-operator", f"--tail={lines}", check=False)
