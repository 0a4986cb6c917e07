"""A real etcd and kube-apiserver on loopback, from the programs that the embedded cluster has built."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from free_ports import free_port

START_TIMEOUT_S = 120


def built_tool(name: str) -> str | None:
    """Newest build of a program in the embedded cluster's cache, else one on PATH."""
    cache = Path(os.environ.get("PDCLUSTER_CACHE") or Path.home() / ".cache" / "pdcluster")
    found = sorted(cache.glob(f"tools/*/bin/{name}"), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else shutil.which(name)


@dataclass(frozen=True)
class ApiServer:
    """A running API server and how to talk to it."""

    kubectl_program: str
    kubeconfig: Path

    def tool(self, name: str) -> str | None:
        """Another program of the embedded cluster, None when it is not built."""
        return built_tool(name)

    def kubectl(self, *arguments: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        """Runs kubectl; `stdin` is a manifest (a dict or text) for `-f -`."""
        text = stdin if stdin is None or isinstance(stdin, str) else yaml.safe_dump(stdin)
        return subprocess.run(
            [self.kubectl_program, "--kubeconfig", str(self.kubeconfig), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)


def _wait_ready(server: ApiServer, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if any(each.poll() is not None for each in processes):
            break
        if server.kubectl("get", "--raw", "/readyz").returncode == 0:
            return
        time.sleep(0.3)
    tail = "\n".join((folder / "apiserver.log").read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"kube-apiserver did not become ready within {START_TIMEOUT_S} s:\n{tail}")


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    programs = {name: built_tool(name) for name in ("etcd", "kube-apiserver", "kubectl")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not built: run `make tools` once")
    folder = tmp_path_factory.mktemp("apiserver")
    client, peer, secure = free_port(), free_port(), free_port()
    subprocess.run(["openssl", "genrsa", "-out", folder / "sa.key", "2048"], check=True, capture_output=True)
    subprocess.run(
        ["openssl", "rsa", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub"],
        check=True,
        capture_output=True,
    )
    (folder / "tokens.csv").write_text('admintoken,admin,admin,"system:masters"\n')
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {
                        "name": "c",
                        "cluster": {"server": f"https://127.0.0.1:{secure}", "insecure-skip-tls-verify": True},
                    }
                ],
                "users": [{"name": "u", "user": {"token": "admintoken"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "c",
            }
        )
    )
    commands = {
        "etcd": [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            f"--etcd-servers=http://127.0.0.1:{client}",
            f"--cert-dir={folder / 'certs'}",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.254",
            f"--secure-port={secure}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.pub'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            "--service-cluster-ip-range=192.0.2.128/26",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--disable-admission-plugins=ServiceAccount",
        ],
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, arguments in commands.items():
            with (folder / f"{name.removeprefix('kube-')}.log").open("wb") as log:
                program = programs[name] or name
                processes.append(
                    subprocess.Popen(
                        [program, *arguments], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                    )
                )
        server = ApiServer(programs["kubectl"] or "kubectl", kubeconfig)
        _wait_ready(server, processes, folder)
        yield server
    finally:
        for each in reversed(processes):
            _stop(each)


ESTABLISHED = """jsonpath={.status.conditions[?(@.type=="Established")].status}"""


@pytest.fixture(scope="session")
def crd_server(apiserver: ApiServer) -> ApiServer:
    """The API server with our CRD established."""
    crd = Path(__file__).resolve().parents[2] / "crds" / "pdcluster.io_pdclusters.yaml"
    applied = apiserver.kubectl("apply", "--server-side", "-f", str(crd))
    assert applied.returncode == 0, applied.stderr
    # It establishes the CRD, serves it, lists it among the kinds there are, and publishes its schema, a moment later
    # each. Not by `kubectl wait`: that fails at once on a CRD so young that it has no conditions.
    established = ["get", "crd/pdclusters.pdcluster.io", "-o", ESTABLISHED]
    for command, said in ((established, "True"), (["get", "pdc"], ""), (["explain", "pdc.spec"], "")):
        deadline = time.monotonic() + 60
        while (done := apiserver.kubectl(*command)).returncode != 0 or said not in done.stdout:
            assert time.monotonic() < deadline, done
            time.sleep(0.2)
    return apiserver
