"""Makes a folder that tells Python of this checkout's entry points, for an environment it is not installed in.

    python hack/sglang/entry_point.py DIR     # then PYTHONPATH=DIR:transfer

SGLang finds plugins by distribution metadata; the environment of SGLang is shared and cached, so nothing is
installed into it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path) -> Path:
    """A .dist-info folder with name, version and entry points of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    made = folder / f"{project['name']}-{project['version']}.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (made / "METADATA").write_text(head)
    groups = project.get("entry-points", {})
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in held.items()) for group, held in groups.items()]
    (made / "entry_points.txt").write_text("\n".join(lines))
    return made


if __name__ == "__main__":
    write(Path(sys.argv[1]))
