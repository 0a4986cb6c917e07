"""The version guard against the installed SGLang: each interface that the backend relies on is there."""

from __future__ import annotations

import pytest

from pdtransfer.engines.sglang import interfaces, plugin
from pdtransfer.engines.sglang.interfaces import PLUGIN, TESTED, TRANSFER, Interface, missing


@pytest.mark.parametrize("one", (*PLUGIN, *TRANSFER), ids=str)
def test_the_installed_sglang_has_it(one: Interface) -> None:
    assert missing([one]) == []


def test_the_installed_version_is_one_that_was_tested() -> None:
    assert interfaces.sglang_version() in TESTED


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (Interface("sglang.srt.no_such_module", "x"), "can not be imported"),
        (Interface("sglang.srt.disaggregation.utils", "TransferBackend.TELEPATHY"), "there is no TELEPATHY"),
        (Interface("sglang.srt.disaggregation.utils", "get_kv_class", ("mood",)), "it takes no mood"),
    ],
)
def test_what_is_not_there_is_named(one: Interface, told: str) -> None:
    (line,) = missing([one])
    assert told in line and str(one) in line


def test_a_missing_interface_is_said_on_stderr_and_raised(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin, "PLUGIN", (Interface("sglang.srt.disaggregation.utils", "gone"),))
    with pytest.raises(plugin.UnfitSGLang, match="there is no gone"):
        plugin.register()
    assert "PDCLUSTER: SGLang 0.5.23 lacks" in capfd.readouterr().err


def test_another_version_is_said_on_stderr(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.9.0")
    plugin.register()
    assert "SGLang 0.9.0 was not tested with pdcluster" in capfd.readouterr().err
