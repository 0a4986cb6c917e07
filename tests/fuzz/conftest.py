"""Makes this folder's helpers importable, and those of the sidecar's and the transfer module's tests."""

from __future__ import annotations

import sys
from pathlib import Path

for name in ("transfer", "sidecar", "fuzz"):
    sys.path.insert(0, str(Path(__file__).parents[1] / name))
