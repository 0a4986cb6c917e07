"""Makes plugins known to SGLang without installing anything: metadata of a distribution in a scratch folder."""

from __future__ import annotations

import os
from pathlib import Path

from kit_machine import TREE

GROUP = "sglang.srt.plugins"
PDCLUSTER = "pdcluster"
"""Name of the entry point and of the backend."""
PLUGINS = {
    PDCLUSTER: "pdtransfer.engines.sglang.plugin:register",
    "pdcluster-test-nixl-dram": "kit_nixl_dram:register",
}
"""Entry point name -> value. Which of them a server loads is `SGLANG_PLUGINS`."""


def python_path(scratch: Path) -> str:
    """PYTHONPATH of a server: this tree's pdtransfer, the test plugin, and the metadata that names both."""
    metadata = scratch / "pdcluster_tests-0.dist-info"
    if not metadata.exists():
        made = scratch / f"making-{os.getpid()}"
        made.mkdir(parents=True)
        (made / "METADATA").write_text("Metadata-Version: 2.1\nName: pdcluster-tests\nVersion: 0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in PLUGINS.items())
        (made / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
        made.rename(metadata)
    return os.pathsep.join((str(TREE / "transfer"), str(Path(__file__).parent), str(scratch)))
