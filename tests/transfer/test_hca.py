"""Adapters and their evidence, told from file trees like those of real machines."""

from pathlib import Path

import pytest

from pdtransfer.agent.hca import Hca, counted_bytes, lane, usable_hcas


def _adapter(root: Path, number: int, name: str, *, node: bool, counters: dict[str, int], port: int = 1) -> None:
    verbs = root / f"sys/class/infiniband_verbs/uverbs{number}"
    verbs.mkdir(parents=True)
    (verbs / "ibdev").write_text(name + "\n")
    at = root / f"sys/class/infiniband/{name}/ports/{port}"
    at.mkdir(parents=True)
    for counter, value in counters.items():
        (at / counter).parent.mkdir(exist_ok=True)
        (at / counter).write_text(f"{value}\n")
    if node:
        (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (root / f"dev/infiniband/uverbs{number}").touch()


def test_an_adapter_without_a_device_node_in_the_pod_does_not_count(tmp_path: Path) -> None:
    _adapter(tmp_path, 0, "mlx5_0", node=True, counters={})
    _adapter(tmp_path, 1, "mlx5_1", node=False, counters={})
    assert usable_hcas(tmp_path) == (Hca("mlx5_0", (1,)),)


def test_no_adapters_on_a_machine_without_any(tmp_path: Path) -> None:
    assert usable_hcas(tmp_path) == ()
    assert counted_bytes((), tmp_path) is None


def test_port_counters_are_four_byte_words_and_efa_counts_bytes(tmp_path: Path) -> None:
    _adapter(tmp_path, 0, "mlx5_0", node=True, counters={"counters/port_xmit_data": 1000, "counters/port_rcv_data": 24})
    _adapter(tmp_path, 1, "rdmap0s6", node=True, counters={"hw_counters/tx_bytes": 7, "hw_counters/rx_bytes": 11})
    assert counted_bytes(usable_hcas(tmp_path), tmp_path) == 4 * 1024 + 18


@pytest.mark.parametrize(
    ("hcas", "before", "after", "same_host", "transport"),
    [
        ((), None, None, False, "TCP"),
        ((), None, None, True, "TCP or shared memory"),
        ((Hca("mlx5_0", (1,)),), 5000, 5000 + 4096, False, "RDMA"),
        ((Hca("mlx5_0", (1,)),), 5000, 5000 + 4095, False, "TCP"),
        ((Hca("mlx5_0", (1,)),), None, None, False, "Unknown"),
    ],
)
def test_only_counters_that_moved_by_the_bytes_are_evidence_of_rdma(
    hcas: tuple[Hca, ...], before: int | None, after: int | None, same_host: bool, transport: str
) -> None:
    assert lane(hcas, before, after, 4096, same_host=same_host).transport == transport
