"""Stand-in for SGLang's compiled kernels on a CPU without AMX, for which PyPI has none.

SGLang's CPU engine imports names from here when it loads; a dense model never calls one. Every name exists, and
every call raises: nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code that this environment does not have")

    missing.__name__ = name
    return missing
