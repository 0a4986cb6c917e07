"""The version guard against the installed SGLang: each interface that the backend relies on is there."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode  # before conn, which imports it in a circle

from pdtransfer.engines.sglang import interfaces, plugin
from pdtransfer.engines.sglang.interfaces import PLUGIN, TESTED, TRANSFER, Interface, missing

CONN = "sglang.srt.disaggregation.common.conn"
SOURCES = [ast.parse(path.read_text()) for path in sorted(Path(interfaces.__file__).parent.glob("*.py"))]
SETTLED_LATER = {("sglang.srt.runtime_context", "get_disagg"), ("sglang.srt.runtime_context", "get_memory")}
"""Asked for inside a try: a card goes without them."""


@pytest.mark.parametrize("one", (*PLUGIN, *TRANSFER), ids=str)
def test_the_installed_sglang_has_it(one: Interface) -> None:
    assert missing([one]) == []


def test_every_name_that_is_imported_of_sglang_is_checked() -> None:
    imported = {
        (node.module, alias.name)
        for source in SOURCES
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    checked = {(one.module, one.name.split(".")[0]) for one in (*PLUGIN, *TRANSFER)}
    assert len(imported) > 20 and imported - checked == SETTLED_LATER


def assigned(cls: type) -> set[str]:
    """`self.x = ...` anywhere in a class of SGLang, read from its source text."""
    tree = ast.parse(inspect.getsource(cls))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


@pytest.mark.parametrize("name", ["CommonKVManager", "CommonKVSender", "CommonKVReceiver", "CommonKVBootstrapServer"])
def test_every_attribute_of_sglangs_objects_that_is_read_is_checked(name: str) -> None:
    """A later SGLang may call it otherwise; without the check the first request would end its scheduler."""
    from sglang.srt.disaggregation.common import conn

    assert DisaggregationMode.PREFILL
    nodes = [node for source in SOURCES for node in ast.walk(source)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    checked = {a for one in (*PLUGIN, *TRANSFER) for a in (*one.attributes, one.name.split(".")[-1])}
    own = {"host", "port", "page_size"}
    """Ours are called so too, and SGLang's are not asked."""
    assert read & assigned(getattr(conn, name)) - own <= checked


def test_every_field_of_kv_args_that_is_read_is_checked() -> None:
    """Most are read as None where they are missing: under another name a pool would be left out silently."""
    nodes = [node for source in SOURCES for node in ast.walk(source)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    (checked,) = [set(one.attributes) for one in TRANSFER if one.name == "KVArgs"]
    named = {"engine_rank", "pp_rank", "system_dp_rank", "is_hybrid_mla_backend"}
    """The manager's own have these names."""
    assert read & set(KVArgs.__annotations__) - named - set(interfaces._OF_ARGS) == set()
    assert checked == set(interfaces._OF_ARGS)


def test_the_installed_version_is_one_that_was_tested() -> None:
    assert interfaces.sglang_version() in TESTED


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (Interface("sglang.srt.no_such_module", "x"), "can not be imported"),
        (Interface("sglang.srt.disaggregation.utils", "TransferBackend.TELEPATHY"), "there is no TELEPATHY"),
        (Interface("sglang.srt.disaggregation.utils", "get_kv_class", ("mood",)), "it takes no mood"),
        (Interface(CONN, "CommonKVManager", attributes=("kv_args", "mood")), "its objects have no mood"),
        (Interface(CONN, "CommonKVManager.clear", attributes=("x",)), "there is no clear"),
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
