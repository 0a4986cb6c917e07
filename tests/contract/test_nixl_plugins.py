"""Which NIXL plugins carry KV and what each reads. Expected from NIXL 1.5.1's sources; the plugin itself is asked in
tests/transfer/test_nixl_plugin_choice.py."""

from __future__ import annotations

import pytest

from pdtransfer.contract.nixl_plugins import (
    PARAMETERS,
    STORAGE,
    engine_settings,
    named_devices,
    plugin_problem,
    unread_parameters,
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("UCX", {}),
        ("UCX", {"num_workers": "2", "num_threads": "8", "split_batch_size": "1024", "ucx_num_device_channels": "4"}),
        ("UCX", {"device_list": "mlx5_0, mlx5_1", "ucx_error_handling_mode": "peer"}),
        ("UCX", {"engine_config": "TLS=rc,MAX_RNDV_RAILS=2"}),
        ("LIBFABRIC", {"striping_threshold": "131072", "max_bw_per_dram_seg": "200", "num_threads": "4"}),
    ],
)
def test_what_a_plugin_reads_is_taken(name: str, parameters: dict[str, str]) -> None:
    assert plugin_problem(name, parameters) == ""


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("POSIX", {}, ("POSIX moves memory to storage", "LIBFABRIC, UCX")),
        ("RDMA", {}, ("RDMA is not known", "LIBFABRIC, UCX")),
        ("UCX", {"workers": "2"}, ("UCX reads no parameter workers", "num_workers")),
        ("UCX", {"ucx_devices": "mlx5_0"}, ("reads no parameter ucx_devices", "device_list does what its name says")),
        ("LIBFABRIC", {"device_list": "rdmap0"}, ("LIBFABRIC reads no parameter device_list", "striping_threshold")),
        ("UCX", {"num_workers": "two"}, ("num_workers", "'two'", "whole number")),
        ("UCX", {"num_threads": "-1"}, ("num_threads", "whole number")),
        ("UCX", {"num_threads": ""}, ("num_threads", "whole number")),
        ("UCX", {"device_list": " "}, ("device_list", "must not be empty")),
        ("UCX", {"ucx_error_handling_mode": "none"}, ("ucx_error_handling_mode", "'none'", "needs 'peer'")),
        ("UCX", {"engine_config": "TLS=rc,cuda_copy"}, ("engine_config", "'cuda_copy' is no NAME=value")),
    ],
)
def test_what_can_not_work_says_why_and_what_there_is(
    name: str, parameters: dict[str, str], words: tuple[str, ...]
) -> None:
    told = plugin_problem(name, parameters)
    assert all(word in told for word in words), told


def test_what_the_installed_plugin_lists_is_known_too() -> None:
    assert plugin_problem("UCX", {"of_a_later_version": "x"}, told={"of_a_later_version"}) == ""
    assert "ucx_devices" in plugin_problem("UCX", {"ucx_devices": "x"}, told={"ucx_devices"})  # listed, not read


def test_storage_plugins_carry_no_kv() -> None:
    assert not STORAGE & set(PARAMETERS)


def test_unread_parameters_are_told_only_of_plugins_that_are_known() -> None:
    assert unread_parameters("UCX", {"a": "1", "num_workers": "2", "ucx_devices": ""}) == ("a", "ucx_devices")
    assert unread_parameters("MOONCAKE", {"a": "1"}) == ()


def test_ucx_settings_and_devices_are_read_out_of_the_parameters() -> None:
    assert engine_settings({"engine_config": "TLS=tcp, NET_DEVICES=lo"}) == {"TLS": "tcp", "NET_DEVICES": "lo"}
    assert engine_settings({}) == {}
    assert named_devices({"device_list": "a"}) == "device_list"
    assert named_devices({"engine_config": "NET_DEVICES=lo"}) == "engine_config (NET_DEVICES)"
    assert named_devices({"engine_config": "TLS=tcp", "num_workers": "1"}) == ""
