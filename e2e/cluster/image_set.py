"""The images of the cluster itself and of the project.

All are small. The project's image holds links into /host, where the nodes
show folders of the host (see shares.py): the system's /usr, the Python
installation, the packages and the source tree (see pod_env.py). So a pod runs
the code as it is in the working tree, and nothing is packed again after an edit.
The engine's image is made the same way of an environment of its own, without the source tree.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import containerd, pod_env, shares, tools
from .errors import ClusterError
from .oci import DEFAULT_PATH, Image, ImageConfig, Tree
from .paths import Layout

PROJECT_IMAGE = "pdcluster.local/pdcluster:dev"
ENGINE_IMAGE = "pdcluster.local/sglang:v0.5.23-cpu"
"""Its tag tells SGLang's version, as the tags of SGLang's own images do."""
BUSYBOX_IMAGE = "pdcluster.local/busybox:1"
NONROOT = 65532

_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_FILES = (  # small files that programs below /usr look for
    "etc/ld.so.cache",
    "etc/protocols",
    "etc/services",
    "etc/ssl/certs/ca-certificates.crt",
)


def coredns_image() -> str:
    return f"pdcluster.local/coredns:{tools.module('coredns').version().lstrip('v')}"


def pause_image(built: tools.Tools) -> Image:
    tree = Tree()
    tree.file("pause", Path(built["pause"]).resolve(), mode=0o755)
    config = ImageConfig(entrypoint=("/pause",), user=f"{NONROOT}:{NONROOT}")
    return Image(containerd.PAUSE_IMAGE, (tree.layer(),), config)


def dns_image(built: tools.Tools) -> Image:
    tree = Tree()
    tree.file("coredns", Path(built["coredns"]).resolve(), mode=0o755)
    config = ImageConfig(entrypoint=("/coredns",), user=f"{NONROOT}:{NONROOT}")
    return Image(coredns_image(), (tree.layer(),), config)


def busybox_image() -> Image:
    program = Path("/bin/busybox").resolve()
    applets = subprocess.run([str(program), "--list-full"], check=True, capture_output=True, text=True, timeout=10)
    tree = Tree()
    _accounts(tree)
    tree.file("bin/busybox", program, mode=0o755)
    for applet in applets.stdout.split():
        if applet != "bin/busybox":
            tree.symlink(applet, "/bin/busybox")
    return Image(BUSYBOX_IMAGE, (tree.layer(),), ImageConfig(command=("sh",)))


def _accounts(tree: Tree) -> None:
    tree.file(
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\n"
        f"nonroot:x:{NONROOT}:{NONROOT}:nonroot:/home/nonroot:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/:/bin/sh\n",
    )
    tree.file("etc/group", f"root:x:0:\nnonroot:x:{NONROOT}:\nnogroup:x:65534:\n")
    tree.file("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    tree.folder("home/nonroot", user=NONROOT, group=NONROOT)
    tree.folder("root")
    tree.folder("tmp", 0o1777)
    tree.folder("var/tmp", 0o1777)
    tree.folder("run")


@dataclass(frozen=True)
class ProjectFolders:
    """What of the host an image of a Python environment needs: the project's, or an engine's (without `source`)."""

    venv: Path
    source: Path | None
    extra: tuple[Path, ...] = ()

    def python(self) -> list[Path]:
        """The Python installation that the virtual environment was made from."""
        settings = self.venv / "pyvenv.cfg"
        if not settings.is_file():
            raise ClusterError(
                f"{self.venv} is no virtual environment (it has no pyvenv.cfg)",
                hint="create it first (python3 -m venv), or name another with --venv",
            )
        found = re.search(r"^home\s*=\s*(\S.*)$", settings.read_text(), re.M)
        if found is None:
            raise ClusterError(f"{settings} doesn't say where its Python is")
        home = Path(found.group(1).strip()).parent
        return [home, home.resolve()]

    def linked(self) -> list[Path]:
        """Folders that the image shows at their own path too: the Python installation, whose program
        looks for its library there. What lies in /usr comes with it."""
        return _outside_usr(self.python())

    def shared(self, pod_environment: Path) -> list[Path]:
        """Folders that the nodes show below /host."""
        wanted = [self.venv, self.venv.resolve(), *self.python(), *self.extra, pod_environment]
        wanted += [] if self.source is None else [self.source]
        return [*_system_folders(), *_outside_usr(wanted)]

    def make_environment(self, into: Path) -> Path:
        """The pods' environment (see pod_env.py); gives its folder."""
        return pod_env.make(into, self.venv, self.source, self.python()[-1] / "bin")


def _outside_usr(folders: Iterable[Path]) -> list[Path]:
    outermost = shares.outermost([Path("/usr"), *(folder.absolute() for folder in folders)])
    return [folder for folder in outermost if folder != Path("/usr")]


def _system_folders() -> list[Path]:
    found = [Path("/usr")]
    candidates = [Path("/", name) for name in _SYSTEM_FOLDERS] + [Path("/etc/alternatives")]
    found += [each for each in candidates if each.is_dir() and not each.is_symlink()]
    return found


def project_image(folders: ProjectFolders, pod_environment: Path) -> Image:
    """The project's image, which runs as a user of its own."""
    return _python_image(PROJECT_IMAGE, folders, pod_environment, user=f"{NONROOT}:{NONROOT}")


def engine_image(folders: ProjectFolders, pod_environment: Path) -> Image:
    """An engine's image: root, as in SGLang's own images, and nothing of this project."""
    return _python_image(ENGINE_IMAGE, folders, pod_environment, user="0:0")


def _python_image(name: str, folders: ProjectFolders, pod_environment: Path, user: str) -> Image:
    tree = Tree()
    environment = f"{containerd.HOST_MOUNT}{pod_environment.absolute()}"
    _accounts(tree)
    for folder in [*_system_folders(), *folders.linked()]:
        tree.symlink(str(folder), f"{containerd.HOST_MOUNT}{folder}")
    for inside in _SYSTEM_FOLDERS:
        path = Path("/", inside)
        if path.is_symlink():
            tree.symlink(inside, str(path.readlink()))
    for inside in _HOST_FILES:
        if (host_file := Path("/", inside)).is_file():
            tree.file(inside, host_file)
    config = ImageConfig(
        environment=(
            f"PATH={environment}/bin:{DEFAULT_PATH}",
            f"VIRTUAL_ENV={environment}",
            "LANG=C.UTF-8",
            # The environment is read-only in a pod.
            "PYTHONDONTWRITEBYTECODE=1",
            "PYTHONUNBUFFERED=1",
            "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
        ),
        user=user,
    )
    return Image(name, (tree.layer(),), config)


def load(layout: Layout, nodes: Sequence[str], images: Iterable[Image]) -> list[str]:
    """Imports images into the nodes that lack them; returns what was imported."""
    wanted = {image.name: image for image in images}
    digests = {name: image.digest() for name, image in wanted.items()}
    imported = []
    with tempfile.TemporaryDirectory(dir=layout.root, prefix="images-") as scratch:
        archives: dict[str, Path] = {}

        def load_into(node: str) -> list[str]:
            held = containerd.images(layout.node(node))
            lacking = [name for name in wanted if held.get(name) != digests[name]]
            for name in lacking:
                containerd.import_image(layout.node(node), archives[name], name)
            return [f"{name} into {node}" for name in lacking]

        for number, (name, image) in enumerate(wanted.items()):
            archives[name] = Path(scratch) / f"{number}.tar"
            image.save(archives[name])
        with ThreadPoolExecutor(max_workers=2) as pool:
            for result in pool.map(load_into, nodes):
                imported += result
    return imported
