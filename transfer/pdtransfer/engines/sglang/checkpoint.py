"""Which weights a folder holds, cheaply: its configuration, and names and sizes of its weight files.

Two folders of one checkpoint have one digest wherever they are mounted. The bytes of the weights are not read: a
rank would need minutes for that.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
CONFIGURATION = "config.json"


def folder_digest(folder: Path) -> str:
    """16 hex digits; empty when it is no folder of a checkpoint."""
    try:
        configuration = (folder / CONFIGURATION).read_bytes()
        files = sorted((f.name, f.stat().st_size) for f in folder.iterdir() if f.suffix in WEIGHTS)
    except OSError:
        return ""
    digest = hashlib.sha256(configuration)
    for name, size in files:
        digest.update(f"\n{name} {size}".encode())
    return digest.hexdigest()[:16]
