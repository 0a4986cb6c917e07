"""Skipped is not passed: in CI, where `make test` has built every program, a skip is a failure."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for free_ports; importlib mode adds no folder


@functools.cache
def gpu_here() -> bool:
    """The driver finds a GPU and torch can use it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return False
    import torch  # slow, and only now known to be worth it

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marker `gpu`."""
    if item.get_closest_marker("gpu") is not None and not gpu_here():
        pytest.skip("no GPU on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A person without the programs sees a skip with its reason; CI sees the same reason as a failure."""
    report = yield
    needs_hardware = item.get_closest_marker("gpu") is not None
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and not needs_hardware:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
