"""Makes torchvision importable beside a torch that its compiled operators do not fit (a CPU build of torch).

torchvision's wheels are CUDA builds. Without their operators the import fails, because fake kernels are registered
for two operators that nobody defined. This adds the two definitions, once, where the import fails; nothing is
computed by them. Run it with the environment's own Python.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

AFTER = "import torchvision.extension  # noqa: F401\n"
ADDED = """
# Added by PDCluster's hack/sglang: schemas only.
if not torchvision.extension._has_ops():
    _missing_ops = torch.library.Library("torchvision", "FRAGMENT")
    _missing_ops.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _missing_ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def importable() -> bool:
    """torchvision can be imported in a fresh process."""
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0
    )


def main() -> None:
    """Edit the installed file if that is needed, and prove that it helped."""
    if importable():
        return
    path = Path(sysconfig.get_paths()["purelib"]) / "torchvision" / "_meta_registrations.py"
    text = path.read_text()
    if ADDED not in text:
        if AFTER not in text:
            raise SystemExit(f"{path}: not the file of the pinned version")
        path.write_text(text.replace(AFTER, AFTER + ADDED, 1))
    if not importable():
        raise SystemExit("torchvision can not be imported, and defining its operators did not help")


if __name__ == "__main__":
    main()
