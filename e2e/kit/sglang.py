"""Real SGLang in pods: its image, a manifest that runs it on a CPU, and what its pods tell."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

from e2e.cluster.image_set import ENGINE_IMAGE
from e2e.kit import install
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import ROOT, CommandFailed, run, wait_for
from pdoperator.api.names import MODEL_PATH, PORT_ENGINE_HTTP

MODEL_FILES = (*install.MODEL_FILES, "tokenizer_config.json")
PAGE = 16
READY_SECONDS = 1200.0
"""Each of an engine's processes imports torch: half a minute on two free cores, many on busy ones."""

COMMON_ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "4096", "--max-running-requests", "8", "--chunked-prefill-size", "64"),
    *("--dtype", "float32", "--skip-server-warmup", "--sleep-on-idle"),
)
"""Without a GPU. A prefill chunk is four pages, so that longer prompts travel in several pieces."""
DECODE_ARGS = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
"""The other ways to back up a retracted request call CUDA."""
_NOT_IN_PODS = ("SGLANG_HOST_IP", "HOST_IP", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES")
"""Of hack/sglang/cpu.env: they tie SGLang to loopback."""


def environment() -> Path:
    """SGLang's own Python environment; CommandFailed where `make sglang-env` was not run."""
    return Path(run([str(ROOT / "hack" / "sglang" / "setup.sh"), "--path"]).stdout.strip())


def image(target: Target) -> str:
    """SGLang's image in this cluster. On your own it is PDCLUSTER_SGLANG_IMAGE: SGLang 0.5.23 that runs on a CPU."""
    if target.embedded:
        return ENGINE_IMAGE
    if named := os.environ.get("PDCLUSTER_SGLANG_IMAGE", ""):
        return named
    raise CommandFailed(
        "KUBECONFIG is set: set PDCLUSTER_SGLANG_IMAGE to an image of SGLang 0.5.23 for CPUs, or unset KUBECONFIG"
    )


def cpu_env() -> list[dict[str, str]]:
    """hack/sglang/cpu.env for a pod, and cores by rank."""
    lines = (ROOT / "hack" / "sglang" / "cpu.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if "=" in line)
    given = {name: value for name, value in given.items() if name not in _NOT_IN_PODS}
    given["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    # With TP SGLang compiles the embedding's mask for each new shape, and a new container has no compiler cache: its
    # ranks would stand still for C++ compilers, half a minute on busy cores, and SGLang tells that it is not healthy.
    given["TORCHDYNAMO_DISABLE"] = "1"
    return [{"name": name, "value": value} for name, value in given.items()]


def make_model(folder: Path) -> Path:
    """The demo's model, with what SGLang needs to load its tokenizer."""
    install.make_model(folder)
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def manifest(target: Target, name: str, *, prefill_tp: int, decode_tp: int, **transfer: Any) -> dict[str, Any]:
    """A PDCluster of one prefill and one decode pod with SGLang on the CPU; the rest is examples/quickstart.yaml."""
    made = install.example("quickstart", target.image)
    made["metadata"]["name"] = name
    spec = made["spec"]
    spec["engine"] = {"type": "SGLang", "image": image(target)}
    # The KV dtype is the model's: SGLang's flag does not name float32.
    spec["kvCache"] = {"pageSize": PAGE}
    spec["transfer"].update(transfer)
    for role, tp, args in (("prefill", prefill_tp, COMMON_ARGS), ("decode", decode_tp, COMMON_ARGS + DECODE_ARGS)):
        spec[role] = {
            "replicas": 1,
            "tensorParallelSize": tp,
            "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
            "env": cpu_env(),
            "extraArgs": list(args),
        }
    return made


def plain_pod(target: Target, name: str) -> dict[str, Any]:
    """A pod of SGLang at TP 1 that is not disaggregated, with the same image, model and settings as `manifest`."""
    where = {"name": "model", "mountPath": MODEL_PATH}
    engine = {
        "name": "engine",
        "image": image(target),
        "command": ["python3", "-m", "sglang.launch_server", "--model-path", MODEL_PATH, "--host", "0.0.0.0"],
        "args": ["--port", str(PORT_ENGINE_HTTP), "--page-size", str(PAGE), *COMMON_ARGS],
        "env": cpu_env(),
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": PORT_ENGINE_HTTP},
            "periodSeconds": 2,
            "timeoutSeconds": 10,
        },
        "volumeMounts": [where],
    }
    model = {"name": "model", "configMap": {"name": "tiny-llama"}}
    spec = {"containers": [engine], "volumes": [model], "terminationGracePeriodSeconds": 5}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def engine_pod(kubectl: Kubectl, name: str, role: str) -> dict[str, Any]:
    """The one pod of a role that is not on its way out."""
    found = kubectl.get("pods", selector=f"pdcluster.io/cluster={name},pdcluster.io/role={role}")
    (pod,) = [p for p in found if not p["metadata"].get("deletionTimestamp")]
    return dict(pod)


def restarts(pod: dict[str, Any]) -> int:
    """How often the engine's container was started again."""
    return sum(c["restartCount"] for c in pod["status"].get("containerStatuses", ()) if c["name"] == "engine")


def processes(kubectl: Kubectl, pod: str, titles: str) -> list[int]:
    """Process ids, in the engine's container, of those whose command line begins with `titles`, such as
    `sglang::scheduler`: one a rank."""
    return list(json.loads(inside(kubectl, pod, _PROCESSES, titles)))


def load(base: str, after: float = 0.0) -> dict[str, int]:
    """What an engine is busy with, of what is not zero: requests it runs or queues, tokens its KV pool has lent. While
    it computes it publishes its load only now and then: `unknown` where it did not after that time (Unix seconds)."""
    with urllib.request.urlopen(f"{base}/v1/loads?include=all", timeout=20) as answer:
        (found,) = json.load(answer)["loads"]
    if found["timestamp"] < after:
        return {"unknown": 1}
    counts = {name: int(found[name]) for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
    counts |= {name: int(n) for name, n in found["disaggregation"].items() if name.endswith("_reqs")}
    return {name: count for name, count in counts.items() if count}


def await_idle(base: str, timeout: float = 60) -> None:
    """Until an engine holds nothing: no request, no token of its KV pool."""
    asked = time.time()
    wait_for(
        "the engine holds nothing", lambda: not load(base, asked), timeout=timeout, context=lambda: str(load(base))
    )


def kill(kubectl: Kubectl, pod: str, pid: int) -> None:
    """SIGKILL to a process of the engine's container."""
    inside(kubectl, pod, "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGKILL)", str(pid))


def mapped(kubectl: Kubectl, pod: str, pid: int) -> list[str]:
    """Files that a process of the engine's container has mapped: the libraries it really loaded."""
    return list(json.loads(inside(kubectl, pod, _MAPPED, str(pid))))


def inside(kubectl: Kubectl, pod: str, code: str, *args: str) -> str:
    """What Python code prints that is run in the engine's container, by the image's own Python."""
    return kubectl("exec", pod, "-c", "engine", "--", "python3", "-c", code, *args)


_PROCESSES = """
import json, os, sys
def title(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\\0", b" ").decode()
    except OSError:
        return ""
found = sorted(map(int, filter(str.isdigit, os.listdir("/proc"))))
print(json.dumps([pid for pid in found if title(pid).startswith(sys.argv[1])]))
"""
_MAPPED = """
import json, sys
lines = open(f"/proc/{sys.argv[1]}/maps").read().splitlines()
print(json.dumps(sorted({line.split(None, 5)[5] for line in lines if "/" in line})))
"""
