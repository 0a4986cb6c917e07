"""spec.transfer.plugin from the spec to the engines, the fit check and the status. What NIXL's plugins read is in
tests/contract/test_nixl_plugins.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from domain_makers import quickstart
from domain_world import World

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.container_env import sglang_env
from pdoperator.domain.containers import engine_container
from pdoperator.domain.engine_command import engine_command
from pdoperator.domain.engine_status import engine_status
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.finding import Finding
from pdoperator.domain.plugin import plugin_env
from pdoperator.domain.preflight import preflight
from pdoperator.domain.revision import role_revision, role_spec
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.transfer_settings import nixl_env
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat import Status, check_cards
from pdtransfer.contract.compat.observed import facts_from_cards
from pdtransfer.engines.reference.options import parse_options
from pdtransfer.engines.sglang.settings import read_settings

SGLANG = {"type": "SGLang", "image": "lmsysorg/sglang:v0.5.23"}
WORKERS = {"name": "UCX", "parameters": {"num_workers": "2", "engine_config": "TLS=tcp"}}
EFA = {"name": "LIBFABRIC", "parameters": {"num_threads": "4"}}


def spec_of(**changes: Any) -> PDClusterSpec:
    return PDClusterSpec.model_validate(quickstart(**changes))


def told(spec: PDClusterSpec) -> list[Finding]:
    """Failing and warning findings about the plugin."""
    rules = ("NixlPlugin", "SetTwice", "TransferSetting", "H2", "H14")
    return [f for f in preflight(spec).findings if f.rule in rules and f.status in ("Fail", "Warn")]


@pytest.mark.parametrize("plugin", [WORKERS, EFA])
def test_the_reference_engine_reads_the_plugin_and_its_parameters(
    plugin: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(transfer__plugin=plugin)
    for role in Role:
        for variable in engine_container(spec, role, role_spec(spec, role), DecideSettings())["env"]:
            if "value" in variable:
                monkeypatch.setenv(variable["name"], variable["value"])
        read = parse_options(engine_command(spec, role, role_spec(spec, role))[1])
        assert (read.nixl_plugin, dict(read.nixl_params)) == (plugin["name"], plugin["parameters"])


@pytest.mark.parametrize("plugin", [WORKERS, EFA])
@pytest.mark.parametrize("backend", ["PDCluster", "NIXL"])
def test_sglang_is_told_in_its_own_variables_whichever_of_the_two_backends_reads_them(
    plugin: dict[str, Any], backend: str
) -> None:
    variables = {e["name"]: e["value"] for e in sglang_env(spec_of(engine=SGLANG, transfer__plugin=plugin,
                                                                   transfer__backend=backend))}  # fmt: skip
    read = read_settings(variables)
    assert (read.nixl_plugin, read.nixl_params) == (plugin["name"], plugin["parameters"])
    assert json.loads(variables["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"]) == plugin["parameters"]


def test_what_is_left_alone_is_told_to_nobody() -> None:
    assert not [e for e in sglang_env(spec_of(engine=SGLANG)) if "NIXL" in e["name"]]
    assert nixl_env(spec_of()) == []
    assert told(spec_of()) == told(spec_of(engine=SGLANG)) == []


@pytest.mark.parametrize("engine", [None, SGLANG])
@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ({"name": "POSIX"}, "POSIX moves memory to storage"),
        ({"name": "RDMA"}, "RDMA is not known; the NIXL plugins that carry KV are LIBFABRIC, UCX"),
        ({"parameters": {"workers": "2"}}, "NIXL's UCX reads no parameter workers; it reads device_list"),
        ({"parameters": {"num_workers": "x"}}, "a whole number is needed"),
        ({"parameters": {"ucx_error_handling_mode": "none"}}, "needs 'peer'"),
        ({"name": "LIBFABRIC", "parameters": {"device_list": "a"}}, "LIBFABRIC reads no parameter device_list"),
    ],
)
def test_what_no_rank_could_start_with_is_refused_before_one_does(
    engine: dict[str, Any] | None, plugin: dict[str, Any], words: str
) -> None:
    finding = told(spec_of(transfer__plugin=plugin, **({"engine": engine} if engine else {})))[-1]
    assert (finding.rule, finding.status) == ("H14", "Fail")
    assert finding.message.startswith("prefill: ") and words in finding.message
    assert "spec.transfer.plugin" in finding.action


def test_a_plugin_that_could_not_be_tried_is_warned_about() -> None:
    (finding,) = told(spec_of(engine=SGLANG, transfer__plugin=EFA))
    assert (finding.rule, finding.status) == ("NixlPlugin", "Warn") and "not over LIBFABRIC" in finding.message
    assert told(spec_of(engine=SGLANG, transfer__plugin=EFA, transfer__backend="NIXL")) == []


def test_sglangs_own_backend_passes_over_what_nothing_reads_and_so_it_is_a_warning() -> None:
    stock = {"engine": SGLANG, "transfer__backend": "NIXL"}
    (odd,) = told(spec_of(**stock, transfer__plugin={"parameters": {"workers": "2", "num_workers": "2"}}))
    assert (odd.rule, odd.status) == ("H14", "Warn") and "no parameter workers" in odd.message
    (storage,) = told(spec_of(**stock, transfer__plugin={"name": "OBJ"}))
    assert (storage.rule, storage.status) == ("H14", "Fail") and "OBJ moves memory to storage" in storage.message
    assert told(spec_of(**stock, transfer__plugin={"parameters": {"ucx_error_handling_mode": "none"}})) == []


@pytest.mark.parametrize("engine", [None, SGLANG])
def test_mooncake_has_no_nixl_plugin(engine: dict[str, Any] | None) -> None:
    more = {"engine": engine} if engine else {}
    (finding,) = told(spec_of(transfer__backend="Mooncake", transfer__plugin=WORKERS, **more))
    assert (finding.rule, finding.status) == ("TransferSetting", "Fail")


def test_network_devices_are_named_in_one_place() -> None:
    fabric = {"type": "TCP", "devices": ["eth0"]}
    twice = spec_of(engine=SGLANG, transfer__fabric=fabric, transfer__plugin={"parameters": {"device_list": "eth0"}})
    (finding,) = told(twice)
    assert (finding.rule, finding.status) == ("SetTwice", "Fail") and "device_list" in finding.message
    efa = spec_of(engine=SGLANG, transfer__fabric=fabric, transfer__plugin=EFA)
    assert [f.status for f in told(efa)] == ["Warn", "Warn"]
    assert "PDTRANSFER_NET_DEVICES" not in {e["name"] for e in plugin_env(efa)}
    assert "PDTRANSFER_NET_DEVICES" in {e["name"] for e in plugin_env(spec_of(engine=SGLANG, transfer__fabric=fabric))}


def test_a_roles_own_variable_is_checked_as_well_and_sides_that_differ_do_not_fit() -> None:
    mine = [{"name": "SGLANG_DISAGGREGATION_NIXL_BACKEND", "value": "LIBFABRIC"}]
    for engine in ({"engine": SGLANG}, {}):
        found = {f.rule: f for f in told(spec_of(decode__env=mine, **engine))}
        assert found["H2"].status == "Fail"
        assert "prefill's NIXL plugin is UCX, decode's LIBFABRIC" in found["H2"].message
        assert found["NixlPlugin"].message.startswith("spec.decode.env (SGLANG_DISAGGREGATION_NIXL_BACKEND")
    params = [{"name": "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "value": "{workers}"}]
    (bad,) = told(spec_of(engine=SGLANG, prefill__env=params))
    assert (bad.rule, bad.status) == ("H14", "Fail")
    (differ,) = told(spec_of(engine=SGLANG, prefill__env=[{**params[0], "value": '{"num_workers": "2"}'}]))
    assert (differ.rule, differ.status) == ("H14", "Warn") and "num_workers is 2 on prefill" in differ.message


def test_running_ranks_with_different_plugins_are_not_wired() -> None:
    world = World(quickstart())
    world.run()
    prefill, decode = (world.side(role)[0].cards for role in Role)
    assert check_cards(prefill, decode, Backend.PDCLUSTER).finding("H2").status is Status.PASS  # type: ignore[union-attr]
    other = tuple(
        c.model_copy(update={"engine": c.engine.model_copy(update={"nixl_plugin": "LIBFABRIC"})}) for c in decode
    )
    report = check_cards(prefill, other, Backend.PDCLUSTER)
    assert report.verdict is Status.FAIL
    assert report.finding("H2").message.startswith("prefill's NIXL plugin is UCX, decode's LIBFABRIC")  # type: ignore[union-attr]


def test_the_status_shows_what_the_cards_tell_and_before_that_what_the_spec_asks_for() -> None:
    spec = spec_of(engine=SGLANG, transfer__plugin=WORKERS)
    asked = engine_status(spec, Role.PREFILL, ())
    assert asked is not None and asked.settings["nixlPlugin"] == "UCX"
    assert json.loads(asked.settings["nixlParameters"]) == WORKERS["parameters"]
    world = World(quickstart())
    world.run()
    cards = world.side(Role.PREFILL)[0].cards
    engine = {"nixl_plugin": "LIBFABRIC", "nixl_params": (("num_threads", "4"),)}
    cards = tuple(c.model_copy(update={"engine": c.engine.model_copy(update=engine)}) for c in cards)
    shown = engine_status(spec, Role.PREFILL, cards)
    assert shown is not None and {"nixlPlugin", "nixlParameters"} <= set(shown.observed or ())
    assert shown.settings["nixlPlugin"] == "LIBFABRIC"
    assert json.loads(shown.settings["nixlParameters"]) == {"num_threads": "4"}
    rewritten = {r.name: (r.asked, r.effective) for r in shown.rewrites or ()}
    assert json.loads(rewritten["nixlParameters"][0]) == WORKERS["parameters"]
    assert facts_from_cards(cards, spec_facts(spec)[0]).nixl_backend == "LIBFABRIC"


def test_the_plugin_rolls_both_roles_pods() -> None:
    for role in Role:
        assert role_revision(spec_of(), role) != role_revision(spec_of(transfer__plugin=WORKERS), role)
        assert role_revision(spec_of(), role) == role_revision(spec_of(transfer__plugin={"name": "UCX"}), role)
