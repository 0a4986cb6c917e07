"""Ways to break a running pod from outside, for tests on the embedded cluster and on any other."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from e2e.kit.cluster import Target
from e2e.kit.install import CRD
from e2e.kit.kubectl import Kubectl
from e2e.kit.processes import seen
from e2e.kit.shell import CommandFailed
from pdoperator.api.names import pod_server_name, tls_secret_name
from pdoperator.runtime.pki import new_authority, pod_leaf


def foreign_certificate(kubectl: Kubectl, name: str) -> str:
    """Overwrite the pods' TLS Secret of PDCluster `name` with one of another authority that has the right
    name in it. Returns the foreign CA, base64, as the Secret holds it."""
    uid = kubectl.get("pdcluster", name)["metadata"]["uid"]
    foreign = new_authority(time.time())
    leaf = pod_leaf(foreign, pod_server_name(uid), time.time())
    files = {"ca.crt": foreign.bundle, "tls.crt": leaf.certificate, "tls.key": leaf.key}
    data = {key: base64.b64encode(value).decode() for key, value in files.items()}
    kubectl("patch", "secret", tls_secret_name(name), "--type=merge", "-p", json.dumps({"data": data}))
    return data["ca.crt"]


def _processes(pod: str, program: str) -> list[int]:
    found = [p.pid for p in seen() if f"POD_NAME={pod}" in p.environment and program in p.command]
    if not found:
        raise CommandFailed(f"no process of pod {pod} runs {program} on this machine")
    return found


def kill_from_outside(pod: str, program: str) -> None:
    """SIGKILL `program` of `pod`, as the kernel does where memory is short. Only from outside (embedded cluster): a
    container's first process can not be killed by what runs beside it. With it end all processes of its container."""
    for pid in _processes(pod, program):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def hung(pod: str, program: str) -> Iterator[None]:
    """SIGSTOP `program` of `pod`, whose processes this machine sees (embedded cluster); SIGCONT at the end."""
    pids = _processes(pod, program)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the kubelet may have ended it
                os.kill(pid, signal.SIGCONT)


@contextmanager
def newer_crd(target: Target, engine: str) -> Iterator[None]:
    """The CRD takes an engine type that this operator does not know, as one of a later release would."""
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/engine/properties/type/enum"
    found = target.kubectl.get("crd", CRD)
    at = found
    for step in path.strip("/").split("/"):
        at = at[int(step)] if isinstance(at, list) else at[step]
    old = list(at)

    def put(values: list[str]) -> None:
        patch = [{"op": "replace", "path": path, "value": values}]
        target.kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps(patch))

    put([*old, engine])
    try:
        yield
    finally:
        put(old)
