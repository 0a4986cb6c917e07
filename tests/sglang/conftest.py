"""Tests against the installed SGLang: run by `make test-sglang` with SGLang's own Python, and by nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# The kit_* modules beside the tests.
sys.path.insert(0, str(Path(__file__).parent))

# `make test` runs in an environment without SGLang; there this folder is empty. Where `tests` is on the path this very
# folder is found as a namespace package of that name, which has no origin.
_found = importlib.util.find_spec("sglang")
collect_ignore_glob = [] if _found is not None and _found.origin else ["*"]
