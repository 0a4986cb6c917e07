"""The embedded cluster is a part of the source tree, not of the installed packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
