"""The Python environment that pods see: the host's packages and sources, each below /host.

A virtual environment is full of absolute paths (its scripts' first lines, its links, its .pth files), and a
pod may mount something of its own over any of them: a checkout below /tmp vanishes behind the emptyDir that
a pod with a read-only root has there. So pods get an environment whose every path begins with /host, where
nothing else is mounted. It holds no packages, only scripts and one .pth file.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from . import containerd
from .errors import ClusterError

SOURCES = ("operator", "transfer")
"""Folders of the source tree that hold its import packages."""


def make(into: Path, venv: Path, source: Path | None, home: Path) -> Path:
    """Writes the environment of `venv` (made from the Python in `home`) for pods, with the packages of the tree
    `source` on its path; gives the folder.

    The folder stays the same one when it is made again: nodes have it mounted."""
    version, packages = _packages(venv)
    site = into / "lib" / f"python{version}" / "site-packages"
    for folder in (into / "bin", site):
        folder.mkdir(parents=True, exist_ok=True)
    sources = [] if source is None else [source / name for name in SOURCES]
    seen = [folder for folder in sources if folder.is_dir()] + packages
    (site / "pods.pth").write_text("".join(f"{_in_pod(path)}\n" for path in seen))
    (into / "pyvenv.cfg").write_text(f"home = {_in_pod(home)}\ninclude-system-site-packages = false\n")
    for name in ("python", "python3", f"python{version}"):
        link = into / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(_in_pod(home / f"python{version}"))
    for script in sorted((venv / "bin").iterdir()):
        _script(script, into)
    return into


def _in_pod(path: Path) -> str:
    return f"{containerd.HOST_MOUNT}{path.absolute()}"


def _packages(venv: Path) -> tuple[str, list[Path]]:
    """(X.Y, folders of packages that this environment's Python looks into besides its own library)."""
    ask = (
        "import json, sys; json.dump(['%d.%d' % sys.version_info[:2], "
        "[p for p in sys.path if p.endswith('-packages')]], sys.stdout)"
    )
    python = venv / "bin" / "python"
    try:
        done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as broken:
        raise ClusterError(
            f"{python} does not run: {broken}", hint="make the environment anew: rm -r .venv; make setup"
        ) from broken
    version, folders = json.loads(done.stdout)
    return version, [Path(folder) for folder in folders]


def _script(script: Path, into: Path) -> None:
    """A console script, with this environment's Python in its first line."""
    if script.name.startswith(("python", "activate")) or not script.is_file():
        return
    try:
        text = script.read_text()
    except UnicodeDecodeError:
        return  # a program, not a script
    if re.match(r"#!.*python", text):
        target = into / "bin" / script.name
        target.write_text(f"#!{_in_pod(into)}/bin/python\n" + text.partition("\n")[2])
        target.chmod(0o755)
