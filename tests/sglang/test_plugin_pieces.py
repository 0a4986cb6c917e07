"""The backend's small parts without a transfer: layout, memory kinds, rows, messages, settings, devices."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import HeadSlice
from pdtransfer.engines.sglang.checkpoint import folder_digest
from pdtransfer.engines.sglang.devices import net_devices
from pdtransfer.engines.sglang.events import ready_event
from pdtransfer.engines.sglang.layout import BadLayout, Stage, head_slice, pool_regions
from pdtransfer.engines.sglang.memory import driver_kind, host_only, pointer_kinds
from pdtransfer.engines.sglang.messages import BadMessage, GiveUp, Introduce, Note, decode, encode
from pdtransfer.engines.sglang.rows import MAGIC, BadRows, Buffers, Trailer, pack, unpack
from pdtransfer.engines.sglang.settings import BadSetting, read_settings
from pdtransfer.engines.sglang.threads import watched

# --- layout ------------------------------------------------------------------------------------


def args(count: int, size: int = 64, **more: Any) -> SimpleNamespace:
    """KVArgs with `count` buffers of 10 pages of `size` bytes, 4096 apart."""
    return SimpleNamespace(
        kv_data_ptrs=[4096 * (i + 1) for i in range(count)],
        kv_data_lens=[10 * size] * count,
        kv_item_lens=[size] * count,
        **more,
    )


HEADS = Stage(0, HeadSlice(first=0, count=2, total=2))
LATENT = Stage(0, None)


def told(found: Any) -> list[tuple[int, str, bool, str]]:
    return [(r.layer, r.kind, r.draft, r.pool) for r in found]


def test_keys_then_values_then_drafts() -> None:
    found = pool_regions(args(6, num_draft_entries=2), Stage(4, HEADS.heads, 2), host_only)
    assert told(found) == [
        (4, "K", False, ""),
        (5, "K", False, ""),
        (4, "V", False, ""),
        (5, "V", False, ""),
        (0, "K", True, ""),
        (0, "V", True, ""),
    ]
    assert [r.items for r in found] == [10] * 6 and found[2].address == 4096 * 3


def test_layers_are_those_sglang_names() -> None:
    found = pool_regions(args(4, kv_layer_ids=[3, 7, 3, 7]), HEADS, host_only)
    assert [(r.layer, r.kind) for r in found] == [(3, "K"), (7, "K"), (3, "V"), (7, "V")]


def test_latent_rows_one_a_layer() -> None:
    found = pool_regions(args(3, num_draft_entries=1), LATENT, host_only)
    assert told(found) == [(0, "LATENT", False, ""), (1, "LATENT", False, ""), (0, "LATENT", True, "")]


def component(word: str, count: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "state_types": [SimpleNamespace(value=word)],
        "state_data_ptrs": [[1 << 20 | 4096 * i for i in range(count)]],
        "state_data_lens": [[5 * size] * count],
        "state_item_lens": [[size] * count],
        "state_layer_ids": [[]],
        **more,
    }


def test_index_rows_are_of_the_models_layers() -> None:
    found = pool_regions(args(2, **component("dsa", 2, 12)), LATENT, host_only)
    assert told(found)[2:] == [(0, "INDEX", False, "dsa.0"), (1, "INDEX", False, "dsa.0")]


def test_a_layer_that_stores_nothing_has_no_region() -> None:
    more = component("dsa", 2, 12)
    more["state_data_lens"] = [[60, 0]]
    assert told(pool_regions(args(2, **more), LATENT, host_only))[2:] == [(0, "INDEX", False, "dsa.0")]


def test_a_window_like_the_models_rows_is_cut_by_head_and_another_is_not() -> None:
    like = component("swa", 4, 64, swa_kv_cache_layout="nhd")
    kinds = [r.kind for r in pool_regions(args(2, **like), HEADS, host_only)][2:]
    assert kinds == ["K", "K", "V", "V"]
    other = component("swa", 4, 32, swa_kv_cache_layout="nhd")
    assert {r.kind for r in pool_regions(args(2, **other), HEADS, host_only)[2:]} == {"STATE"}
    packed = component("swa", 4, 64, swa_kv_cache_layout="vectorized_5d")
    assert {r.kind for r in pool_regions(args(2, **packed), HEADS, host_only)[2:]} == {"STATE"}


def test_two_tensors_of_one_layers_state_are_told_apart_on_every_stage() -> None:
    """Conv and temporal state: ids repeat. A prefill stage with layers 2 and 3 names them as decode does."""
    whole = component("mamba", 8, 12, state_layer_ids=[[0, 1, 2, 3, 0, 1, 2, 3]])
    part = component("mamba", 4, 12, state_layer_ids=[[2, 3, 2, 3]])
    every = [r.layer for r in pool_regions(args(2, **whole), HEADS, host_only)][2:]
    some = [r.layer for r in pool_regions(args(2, **part), Stage(0, HEADS.heads, 2), host_only)][2:]
    assert len(set(every)) == 8
    assert some == [every[2], every[3], every[6], every[7]]


def test_host_pools_are_the_same_layers_in_host_memory() -> None:
    more = {"host_kv_data_ptrs": [1 << 21, 1 << 22], "host_kv_data_lens": [640, 640], "host_kv_item_lens": [64, 64]}
    found = pool_regions(args(2, **more), HEADS, lambda _: MemoryKind.VRAM)
    assert [(r.layer, r.kind, r.memory) for r in found] == [
        (0, "K", "VRAM"),
        (0, "V", "VRAM"),
        (0, "K", "DRAM"),
        (0, "V", "DRAM"),
    ]


def test_device_memory_is_on_the_ranks_own_gpu() -> None:
    """SGLang numbers the GPUs of its ranks 0, 1, ... in every one of its processes."""
    more = {"host_kv_data_ptrs": [1 << 21, 1 << 22], "host_kv_data_lens": [640, 640], "host_kv_item_lens": [64, 64]}
    kinds = lambda a: MemoryKind.VRAM if a != 4096 else MemoryKind.DRAM  # noqa: E731
    found = pool_regions(args(2, **more, **component("mamba", 1, 12)), HEADS, kinds, gpu=3)
    assert [(r.memory, r.device) for r in found] == [("DRAM", 0), ("VRAM", 3), ("VRAM", 3), ("DRAM", 0), ("DRAM", 0)]


def test_each_pointer_has_its_own_kind() -> None:
    """HiSparse: KV in host memory, the index on the device."""
    kinds = lambda a: MemoryKind.VRAM if a >= 1 << 20 else MemoryKind.DRAM  # noqa: E731
    found = pool_regions(args(2, **component("dsa", 2, 12)), LATENT, kinds)
    assert [r.memory for r in found] == ["DRAM", "DRAM", "VRAM", "VRAM"]


@pytest.mark.parametrize(
    ("made", "stage", "word"),
    [
        (args(3), HEADS, "not as many K as V"),
        (args(2, num_draft_entries=2), HEADS, "none of the model"),
        (args(2, kv_layer_ids=[1]), HEADS, "1 ids for 2 buffers"),
        (args(2, **component("mamba", 1, 12)), Stage(0, HEADS.heads, 2), "in pipeline stages"),
        (args(2, mla_compression_ratios=[4, 128]), Stage(0, None, 2), "compressed MLA in pipeline stages"),
        (args(3, **component("dsa", 2, 12)), LATENT, "2 index buffers for 3 layers"),
        (args(2, size=0), HEADS, ""),
    ],
)
def test_lists_that_make_no_sense_are_refused_by_name(made: Any, stage: Stage, word: str) -> None:
    if not word:
        made.kv_data_lens = [640, 640]
        word = "a buffer of 640 bytes has pages of 0"
    with pytest.raises(BadLayout, match=word):
        pool_regions(made, stage, host_only)


@pytest.mark.parametrize(
    ("tp", "size", "total", "first", "count"), [(1, 2, 8, 4, 4), (3, 4, 2, 1, 1), (1, 4, 2, 0, 1), (0, 1, 8, 0, 8)]
)
def test_heads_of_a_rank(tp: int, size: int, total: int, first: int, count: int) -> None:
    assert head_slice(tp, size, total) == HeadSlice(first=first, count=count, total=total)


# --- memory kinds ------------------------------------------------------------------------------


class Driver:
    """cuPointerGetAttribute of a driver: memory types by address, 1 for a pointer that it does not know."""

    def __init__(self, types: dict[int, int]) -> None:
        self._types = types

    def cuPointerGetAttribute(self, answer: Any, attribute: int, address: ctypes.c_uint64) -> int:
        assert attribute == 2
        if address.value not in self._types:
            return 1
        answer._obj.value = self._types[address.value]
        return 0


def test_kinds_are_the_drivers() -> None:
    kind = driver_kind(Driver({1: 1, 2: 2, 4: 4}))  # type: ignore[arg-type]
    assert [kind(a).value for a in (1, 2, 4, 9)] == ["DRAM", "VRAM", "VRAM", "DRAM"]


def test_without_a_device_all_is_host_memory_unless_it_is_emulated() -> None:
    assert pointer_kinds("cpu", emulate=False)(1) is MemoryKind.DRAM
    assert pointer_kinds("cpu", emulate=True)(1) is MemoryKind.VRAM


# --- rows --------------------------------------------------------------------------------------

OF = Trailer(5, 2, "s", "d")


def test_rows_come_back_as_they_went() -> None:
    assert unpack(pack(OF, [b"ab", b"", b"xyz"])) == (OF, (b"ab", b"", b"xyz"))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"x" * 40,
        MAGIC + b"\xff\xff\xff\xff{}",
        pack(OF, [b"ab"])[:-1],
        pack(OF, [b"ab"]) + b"c",
        MAGIC + b"\x02\0\0\0[]",
        pack(OF, [b"ab"]).replace(b'"room":5', b'"room":"'),
        pack(OF, [b"ab"]).replace(b"[2]", b"[true]".ljust(3)[:3]),
    ],
)
def test_other_bytes_are_refused(bad: bytes) -> None:
    with pytest.raises(BadRows):
        unpack(bad)


def test_rows_of_other_widths_are_written_as_far_as_both_reach() -> None:
    """Decode with a draft model of its own has wider hidden states than prefill."""
    wide, narrow = np.zeros((2, 8), np.uint8), np.zeros((2, 2), np.uint8)
    held = Buffers((wide.ctypes.data, narrow.ctypes.data), (8, 2), 2)
    held.write(1, [b"\x01\x02", b"\x03\x04\x05"])
    assert wide.tolist() == [[0] * 8, [1, 2, 0, 0, 0, 0, 0, 0]] and narrow.tolist() == [[0, 0], [3, 4]]
    assert held.read(1)[1] == b"\x03\x04"
    with pytest.raises(BadRows, match="metadata row 2 is not in"):
        held.read(2)


# --- the rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Introduce(),
        Note(room=-5, attempt=1, first_page=2, source="i", destination="d"),
        GiveUp(room=1, attempt=0, reason="é", source="i"),
    ],
)
def test_messages_come_back_as_they_went(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"pdcluster-1"], [b"pdcluster-1", b"{}"], [b"pdcluster-1", b'{"type":"note","room":1}']]
)
def test_other_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        decode(frames)


def test_settings_are_the_operators_variables() -> None:
    held = read_settings({"POD_UID": "u", "PDTRANSFER_SOCKET": "/s", "PDTRANSFER_TLS_DIR": "/t", "PDCLUSTER_UID": "c"})
    assert (held.pod_uid, held.cluster_uid, held.rostered, str(held.tls_dir)) == ("u", "c", True, "/t")
    assert not read_settings({}).rostered


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PDTRANSFER_STRATEGY", "magic"),
        ("PDTRANSFER_STAGING_MIB", "-1"),
        ("PDTRANSFER_QUARANTINE_MIB", "1.5"),
        ("PDTRANSFER_DIGEST", "perhaps"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=name):
        read_settings({name: value})


def test_adapters_are_named_as_ucx_does() -> None:
    assert net_devices(None, 0) is None
    assert net_devices("mlx5_0, mlx5_1:2", 0) == "mlx5_0:1,mlx5_1:2"
    assert net_devices(json.dumps({"3": "mlx5_4"}), 3) == "mlx5_4:1"
    with pytest.raises(ValueError, match="no adapter for GPU 1"):
        net_devices(json.dumps({"3": "mlx5_4"}), 1)
    with pytest.raises(ValueError, match="no JSON"):
        net_devices("{3: mlx5_4}", 3)


def test_a_file_of_adapters_is_read_as_sglang_reads_it(tmp_path: Path) -> None:
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu

    file = tmp_path / "devices.json"
    file.write_text(json.dumps({"03": "mlx5_4,mlx5_5", "1": "mlx5_1"}))
    for gpu in (1, 3):
        theirs = get_ib_devices_for_gpu(str(file), gpu)
        assert theirs and net_devices(str(file), gpu) == ",".join(f"{name}:1" for name in theirs.split(","))
    with pytest.raises(ValueError, match="can not be read"):
        net_devices(str(tmp_path / "none.json"), 0)


def test_no_event_is_ready_and_an_event_is_asked() -> None:
    assert ready_event(None).wait(0.0)
    flag = SimpleNamespace(query=lambda: False)
    assert not ready_event(flag).wait(0.0)
    flag.query = lambda: True
    assert ready_event(flag).wait(0.0)


def test_a_thread_that_ends_by_an_error_tells() -> None:
    heard: list[str] = []

    def work() -> None:
        raise KeyError("lost")

    watched("worker", work, heard.append).join(10)
    assert heard == ["thread worker ended: KeyError: 'lost'"]


def test_one_checkpoint_has_one_digest_wherever_it_lies(tmp_path: Any) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * (2 if name == "c" else 1))
    assert folder_digest(tmp_path / "a") == folder_digest(tmp_path / "b") != folder_digest(tmp_path / "c")
    assert folder_digest(tmp_path) == ""
