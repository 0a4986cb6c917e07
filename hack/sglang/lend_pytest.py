"""Links pytest, hypothesis and what they need from this Python into a folder: python hack/sglang/lend_pytest.py DIR"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

LENT = ("pytest", "_pytest", "pluggy", "iniconfig", "pytest_timeout", "py", "hypothesis", "sortedcontainers")
LENT += ("_hypothesis_globals", "_hypothesis_ftz_detector", "_hypothesis_pytestplugin")


def link(folder: Path) -> None:
    """One link a package or module."""
    for name in LENT:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"this Python has no {name}: run make install")
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (folder / source.name).symlink_to(source)
    # pytest -v prints pluggy's version, and finds it in the metadata only.
    for file in importlib.metadata.distribution("pluggy").files or ():
        if file.name == "METADATA":
            metadata = Path(str(file.locate())).parent
            (folder / metadata.name).symlink_to(metadata)


if __name__ == "__main__":
    link(Path(sys.argv[1]))
