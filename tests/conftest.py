"""Skipped is not passed: in CI, where `make test` has built every program, a skip is a failure."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A person without the programs sees a skip with its reason; CI sees the same reason as a failure."""
    report = yield
    needs_hardware = item.get_closest_marker("gpu") is not None
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and not needs_hardware:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
