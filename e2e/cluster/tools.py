"""Builds Kubernetes' own programs, etcd, CoreDNS and Helm from pinned Go modules.

Each folder of e2e/tools is a Go module whose go.mod and go.sum pin one
program (or one family of programs). A module is built once into

    $PDCLUSTER_CACHE/tools/<module>-<key>/bin

where the key covers everything that decides the result: the module's files,
the Go version and the build flags. A second call finds the files there and
does nothing. `bin_dir` gathers links to all of them in one folder for PATH.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError
from .paths import cache_dir

TOOLS_SOURCE = Path(__file__).resolve().parent.parent / "tools"
BUILD_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Module:
    """One Go module of e2e/tools and the programs that are built from it."""

    name: str
    programs: tuple[tuple[str, str], ...]  # (file name, Go package)
    pinned: str = ""  # the module whose version the programs report
    version_flags: tuple[str, ...] = ()  # linker -X variables; see _variables

    @property
    def source(self) -> Path:
        return TOOLS_SOURCE / self.name

    def version(self) -> str:
        """The version that go.mod pins, such as v1.34.4."""
        return self._required(self.pinned) if self.pinned else ""

    def _required(self, dependency: str) -> str:
        text = (self.source / "go.mod").read_text()
        found = re.search(rf"^\s*(?:require\s+)?{re.escape(dependency)}\s+(v\S+)", text, re.M)
        if found is None:
            raise ClusterError(f"{self.source}/go.mod doesn't require {dependency}")
        return found.group(1)

    def ldflags(self) -> str:
        return " ".join(["-s", "-w", *(f"-X {flag}" for flag in self._variables())])

    def _variables(self) -> Iterable[str]:
        version = self.version()
        major, minor = [*version.lstrip("v").split("."), "", ""][:2]
        # client-go v0.N.P belongs to Kubernetes v1.N.P.
        client_minor = ""
        if any("{client_minor}" in flag for flag in self.version_flags):
            client_minor = self._required("k8s.io/client-go").split(".")[1]
        for flag in self.version_flags:
            yield flag.format(version=version, major=major, minor=minor, client_minor=client_minor)

    def key(self, go_version: str) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.source.glob("*")):
            if path.name in {"go.mod", "go.sum"} or path.suffix == ".go":
                digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
        for text in (go_version, self.ldflags(), repr(self.programs)):
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()[:16]


def _kubernetes(command: str) -> tuple[str, str]:
    return (command, f"k8s.io/kubernetes/cmd/{command}")


# client-go has a copy of its own of the version variables, which kubectl shows.
_KUBERNETES_VERSION = tuple(
    f"k8s.io/{package}/version.{variable}"
    for package in ("component-base", "client-go/pkg")
    for variable in (
        "gitVersion={version}",
        "gitMajor={major}",
        "gitMinor={minor}",
        "gitTreeState=clean",
    )
)

MODULES = (
    Module("pause", (("pause", "."),)),
    Module(
        "kubernetes",
        tuple(
            _kubernetes(command)
            for command in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            )
        ),
        pinned="k8s.io/kubernetes",
        version_flags=_KUBERNETES_VERSION,
    ),
    Module(
        "etcd",
        (("etcd", "go.etcd.io/etcd/server/v3"),),
        pinned="go.etcd.io/etcd/server/v3",
    ),
    Module("coredns", (("coredns", "."),), pinned="github.com/coredns/coredns"),
    Module(
        "helm",
        (("helm", "helm.sh/helm/v3/cmd/helm"),),
        pinned="helm.sh/helm/v3",
        version_flags=(
            "helm.sh/helm/v3/internal/version.version={version}",
            # What `helm template` and `helm lint` take for the cluster's version.
            *(
                f"helm.sh/helm/v3/pkg/{package}.{variable}"
                for package in ("chartutil", "lint/rules")
                for variable in ("k8sVersionMajor=1", "k8sVersionMinor={client_minor}")
            ),
        ),
    ),
)


def module(name: str) -> Module:
    return next(each for each in MODULES if each.name == name)


@dataclass(frozen=True)
class Tools:
    """Where the built programs are."""

    bin_dir: Path
    key: str

    def __getitem__(self, program: str) -> str:
        return str(self.bin_dir / program)


def _go() -> str:
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        raise ClusterError(
            "the Go toolchain isn't installed: the cluster's programs are built from source",
            hint="install Go 1.26 or later and put it on PATH",
        )
    return found


def _go_version(go: str) -> str:
    # The VERSION file spares a warm run the start of the go command.
    version_file = Path(go).resolve().parent.parent / "VERSION"
    if version_file.is_file():
        return version_file.read_text().split()[0]
    asked = subprocess.run([go, "env", "GOVERSION"], check=True, capture_output=True, text=True, timeout=60)
    return asked.stdout.strip()


def programs() -> list[str]:
    return [name for each in MODULES for name, _ in each.programs]


def ensure_tools(say: Callable[[str], None], only: Iterable[str] | None = None) -> Tools:
    """Builds the programs that are missing (or of those named) and answers where they are."""
    wanted = set(programs() if only is None else only)
    if unknown := wanted - set(programs()):
        raise ClusterError(f"no program is called {', '.join(sorted(unknown))}", hint=f"one of {programs()}")
    go = _go()
    go_version = _go_version(go)
    combined = hashlib.sha256()
    built: dict[str, Path] = {}
    for each in MODULES:
        key = each.key(go_version)
        combined.update(f"{each.name}={key}\n".encode())
        target = cache_dir() / "tools" / f"{each.name}-{key}" / "bin"
        for name, package in each.programs:
            built[name] = target / name
            if name in wanted and not built[name].exists():
                with _build_lock():
                    if not built[name].exists():
                        _build(go, each, name, package, built[name], say)
    key = combined.hexdigest()[:16]
    bin_dir = cache_dir() / "tools" / key / "bin"
    _link_all(bin_dir, built)
    return Tools(bin_dir, key)


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """One build at a time: two would do the same work, each at half the speed."""
    folder = cache_dir() / "tools"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _link_all(bin_dir: Path, built: dict[str, Path]) -> None:
    bin_dir.mkdir(parents=True, exist_ok=True)
    for name, target in built.items():
        link = bin_dir / name
        if not target.exists() or (link.is_symlink() and link.readlink() == target):
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _build(go: str, source: Module, name: str, package: str, target: Path, say: Callable[[str], None]) -> None:
    folder = target.parent.parent
    target.parent.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    # Static programs run in any image and don't depend on the host's C library.
    environment = dict(os.environ, CGO_ENABLED="0", GOFLAGS="-mod=readonly -buildvcs=false")
    environment.setdefault("GOTOOLCHAIN", "local")
    say(f"building {name} {source.version()} (once; log in {log})")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as scratch, log.open("a") as output:
        command = [go, "build", "-trimpath", "-ldflags", source.ldflags()]
        command += ["-o", f"{scratch}/{name}", package]
        try:
            subprocess.run(
                command,
                cwd=source.source,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=BUILD_TIMEOUT_S,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise ClusterError(
                f"{name} didn't build: {error}",
                hint="see the log; the Go module proxy must be reachable (GOPROXY)",
                log=log,
            ) from error
        # Renamed into place whole, so that a build cut short is never taken for done.
        Path(scratch, name).replace(target)
    say(f"built {name} in {time.monotonic() - started:.0f} s")
