"""The operator's command lines are ones that the programs it starts really take."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain import containers, engine_command
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Role
from pdtransfer.engines.reference import options
from pdtransfer.sidecar import config

EXAMPLES = Path(__file__).parents[2] / "examples"


def _spec(change: dict[str, Any]) -> PDClusterSpec:
    raw = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())["spec"]
    return PDClusterSpec.model_validate({**raw, **change})


@pytest.mark.parametrize("side", list(Role))
@pytest.mark.parametrize(
    ("change", "kv_memory"),
    [
        ({}, {"prefill": "vram-emulated", "decode": "vram-emulated"}),
        ({"decode": {"hostKV": {"mode": "HostReceive"}}}, {"prefill": "vram-emulated", "decode": "dram"}),
    ],
)
def test_reference_takes_the_engine_command(
    side: Role, change: dict[str, Any], kv_memory: dict[str, str], tmp_path: Path
) -> None:
    spec = _spec(change)
    role = spec.prefill if side is Role.PREFILL else spec.decode
    command, args = engine_command.engine_command(spec, side, role)
    assert command == ["pdtransfer-reference"]
    model = tmp_path / "model"
    model.mkdir()
    found = options.parse_options([str(model) if a == engine_command.model_path(spec) else a for a in args])
    assert found.tp_size == role.tensor_parallel_size
    assert found.mode == side.value
    assert found.kv_memory == kv_memory[side.value]
    assert (found.waiting_timeout, found.kv_timeout) == (
        spec.transfer.timeouts.waiting_seconds,
        spec.transfer.timeouts.transfer_seconds,
    )


@pytest.mark.parametrize("backend", ["PDCluster", "NIXL"])
def test_the_sidecar_takes_its_command(backend: str) -> None:
    spec = _spec({"transfer": {"backend": backend, "fabric": {"type": "TCP"}}})
    container = containers.sidecar_container(spec, DecideSettings())
    assert container["command"] == ["pdtransfer-sidecar"]
    env = {"PDCLUSTER_UID": "c", "POD_UID": "p", "PDCLUSTER_ROLE": "prefill", "POD_NAME": "n"}
    found = config.parse(container["args"], env)
    assert found.wiring is (backend == "PDCluster")
