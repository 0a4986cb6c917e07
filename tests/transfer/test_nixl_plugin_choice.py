"""NIXL's plugin and its parameters with the NIXL that is installed: taken, moved with, or refused with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pdtransfer.contract.nixl_plugins import PARAMETERS, STORAGE, UNREAD
from pdtransfer.engines.sglang.settings import BadSetting, read_settings

pytestmark = pytest.mark.nixl

MAKE = """
import json, os, sys
os.environ.pop("UCX_NET_DEVICES", None)
if sys.argv[2]:
    os.environ["UCX_TLS"] = sys.argv[2]
else:
    os.environ.pop("UCX_TLS", None)
from pdtransfer.agent.nixl import NixlAgent
from pdtransfer.agent.port import AgentFailure
for wanted in json.loads(sys.argv[1]):
    try:
        agent = NixlAgent("a", **wanted)
        print("ANSWER", json.dumps({"transports": agent.transports, "devices": agent.devices}))
        agent.close()
    except AgentFailure as error:
        print("ANSWER", json.dumps({"kind": error.kind, "text": error.message, "posted": error.posted}))
"""


def made(*wanted: dict, ucx_tls: str = "") -> list[dict]:
    """What comes of making an agent with each of these, in a process of its own (NIXL keeps what it once loaded)."""
    command = [sys.executable, "-c", MAKE, json.dumps(wanted), ucx_tls]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ})
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in ran.stdout.splitlines() if "ANSWER " in line[:7]]
    assert len(answers) == len(wanted), ran
    return answers


@pytest.fixture(scope="module")
def inside() -> dict[str, dict]:
    """Plugins of the installed NIXL: those that load with their parameters and memory kinds, the others empty."""
    from nixl import _api, _bindings

    agent = _api.nixl_agent("look", _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    found: dict[str, dict] = {}
    for name in agent.get_plugin_list():
        try:
            parameters, kinds = agent.agent.getPluginParams(name)
            found[name] = {"parameters": set(parameters), "kinds": {str(k) for k in kinds}}
        except _bindings.nixlNotFoundError:
            found[name] = {}
    return found


def test_the_table_names_plugins_that_nixl_has(inside: dict[str, dict]) -> None:
    assert set(PARAMETERS) <= set(inside) and STORAGE & set(inside)
    told = inside["UCX"]["parameters"]
    assert told - PARAMETERS["UCX"] == set(UNREAD)


def test_a_plugin_that_nixl_lists_and_can_not_load_is_told_from_one_that_it_does_not_have(
    inside: dict[str, dict],
) -> None:
    (missing,) = made({"plugin": "NOSUCH"})
    assert missing["kind"] == "nixlNotFoundError" and not missing["posted"]
    assert "no plugin NOSUCH" in missing["text"]
    assert all(name in missing["text"] for name in inside)
    if inside["LIBFABRIC"]:  # a machine with libfabric and CUDA's driver
        return
    (broken,) = made({"plugin": "LIBFABRIC"})
    assert "has the plugin LIBFABRIC and can not load it" in broken["text"] and "libfabric" in broken["text"]


def test_what_the_plugin_would_pass_over_or_misread_never_reaches_it() -> None:
    answers = made(
        {"plugin": "POSIX"},
        {"parameters": {"workers": "2"}},
        {"parameters": {"num_workers": "many"}},
        {"parameters": {"ucx_error_handling_mode": "none"}},
        {"parameters": {"device_list": "lo"}, "net_devices": "lo"},
    )
    words = ("to storage", "reads no parameter workers", "whole number", "needs 'peer'", "named twice")
    for answer, word in zip(answers, words, strict=True):
        assert answer["kind"] == "nixlInvalidParamError" and word in answer["text"], answer


def test_nixl_itself_says_nothing_about_a_parameter_that_nothing_reads() -> None:
    """Why they are checked here: the control."""
    from nixl import _api

    agent = _api.nixl_agent("odd", _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"workers": "2", "ucx_devices": "nosuch0"})
    assert agent.get_backend_params("UCX") == {"workers": "2", "ucx_devices": "nosuch0"}


def test_transports_are_those_that_hold_whoever_chose_them() -> None:
    """They decide who can write without the receiver: a variable of UCX goes before the parameter."""
    tcp = {"parameters": {"engine_config": "TLS=tcp,NET_DEVICES=lo"}}
    assert made(tcp) == [{"transports": ["tcp"], "devices": "lo"}]
    assert made(tcp, {}, ucx_tls="tcp,self") == [
        {"transports": ["tcp", "self"], "devices": "lo"},
        {"transports": ["tcp", "self"], "devices": ""},
    ]


def test_a_value_that_only_ucx_can_judge_is_refused_with_all_that_was_set() -> None:
    (answer,) = made({"parameters": {"engine_config": "TLS=nosuch"}})
    assert answer["kind"] == "nixlBackendError"
    assert "UCX_TLS=nosuch" in answer["text"] and "{'engine_config': 'TLS=nosuch'}" in answer["text"]


@pytest.mark.parametrize(
    "parameters",
    [{"num_threads": "2", "num_workers": "4", "split_batch_size": "4"}, {"engine_config": "TLS=tcp"}],
)
def test_kv_moves_with_parameters_and_the_cards_say_so(ranks, parameters) -> None:
    options = {"config": {"nixl_params": parameters}}
    prefill, decode = ranks.start(1, 1, ucx_tls="tcp", options=options)
    for rank in (*prefill, *decode):
        assert dict(rank.card.engine.nixl_params) == parameters and rank.card.engine.nixl_plugin == "UCX"
        assert "UCX" in rank.card.engine.nixl_plugins
    pages = list(range(12))
    decode[0].ask("receive", room=1, pages=pages)
    prefill[0].ask("send", room=1, pages=pages)
    for rank in (*prefill, *decode):
        assert rank.ask("wait", room=1)["state"] == "Success"
    assert decode[0].ask("check", room=1, pages=pages) == {"holds": True, "untouched": True}


def test_sglangs_own_variables_choose_the_plugin_without_an_operator() -> None:
    name, parameters = "SGLANG_DISAGGREGATION_NIXL_BACKEND", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
    assert read_settings({}).nixl_plugin == "UCX" and read_settings({parameters: "{}"}).nixl_params == {}
    held = read_settings({name: "LIBFABRIC", parameters: '{"num_threads": "4"}'})
    assert (held.nixl_plugin, held.nixl_params) == ("LIBFABRIC", {"num_threads": "4"})
    for bad in ("{", '["a"]', '{"num_threads": 4}'):
        with pytest.raises(BadSetting, match=parameters):
            read_settings({parameters: bad})
