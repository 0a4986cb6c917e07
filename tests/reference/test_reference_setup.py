"""What is wrong with flags or checkpoint is said in one line that names the path; exit code 2."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_kit import free_port
from safetensors.torch import load_file, save_file

from pdtransfer.contract.nixl_plugins import PARAMS_VARIABLE, PLUGIN_VARIABLE
from pdtransfer.engines.reference.link import endpoint_config
from pdtransfer.engines.reference.main import main
from pdtransfer.engines.reference.options import parse_options
from pdtransfer.engines.reference.problems import SetupError
from pdtransfer.session import validate

Spoil = Callable[[Path], None]


def edit_config(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(str(path))
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, str(path))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


CASES: dict[str, tuple[Spoil, str, str]] = {
    "no folder": (shutil.rmtree, "model folder", "is not there"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json", "is not there"),
    "config no json": (lambda f: (f / "config.json").write_text("{") and None, "config.json", "JSON"),
    "not llama": (edit_config(architectures=["MambaForCausalLM"]), "config.json", "LlamaForCausalLM only"),
    "field missing": (edit_config(hidden_size=None), "config.json", "not of the right type"),
    "quantized": (edit_config(quantization_config={"bits": 4}), "config.json", "quantized"),
    "rope": (edit_config(rope_scaling={"rope_type": "yarn"}), "config.json", "'yarn'"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", "is not there"),
    "bad tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"model": 1}') and None,
        "tokenizer.json",
        "can not be parsed",
    ),
    "other tokenizer": (edit_config(vocab_size=100), "tokenizer.json", "not of one checkpoint"),
}
LATE_CASES: dict[str, tuple[Spoil, str, str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors", "neither"),
    "tensor missing": (drop_tensor, "model.layers.2.mlp.up_proj.weight", "no tensor"),
    "cut weights": (cut_weights, "model.safetensors", "can not be read as safetensors"),
    "other shape": (edit_config(intermediate_size=64), "gate_proj", "config.json asks for"),
}
"""Found by the ranks."""


@pytest.mark.parametrize("case", [*CASES, *LATE_CASES])
def test_a_spoiled_checkpoint_is_named_with_exit_code_2(
    case: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, *words = {**CASES, **LATE_CASES}[case]
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    spoil(folder)
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert str(folder) in said and all(word in said for word in words), said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp-size", "0"], "--tp-size must be at least 1"),
        (["--chunked-prefill-size", "20"], "multiple of --page-size 16"),
        (["--max-total-tokens", "8"], "less than one page"),
        (["--kv-staging-mib", "-1"], "--kv-staging-mib must be in 0"),
        (["--kv-quarantine-mib", str(1 << 40)], "--kv-quarantine-mib must be in 0"),
        (["--kv-digest"], "are decode's"),
        (["--disaggregation-mode", "prefill", "--kv-strategy", "staged"], "are decode's"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        parse_options(["--model-path", "m", *flags])


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("plugin", "parameters", "words"),
    [
        ("POSIX", "", "POSIX moves memory to storage, not to another rank; the NIXL plugins that carry KV are"),
        ("", '{"workers": "2"}', "NIXL's UCX reads no parameter workers; it reads device_list"),
        ("", '{"num_workers": 2}', f"{PARAMS_VARIABLE} has 'num_workers' with the value 2, which is no string"),
    ],
)
def test_a_plugin_or_a_parameter_that_nixl_can_not_use_is_said_with_what_there_is(
    plugin: str,
    parameters: str,
    words: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, plugin)
    monkeypatch.setenv(PARAMS_VARIABLE, parameters)
    alone = ["--disaggregation-mode", "prefill", "--peers-file", str(tmp_path / "cards"), "--port", "0"]
    assert main(["--model-path", str(tiny), *alone, "--disaggregation-bootstrap-port", str(free_port())]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_the_plugin_and_its_parameters_reach_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGIN_VARIABLE, "LIBFABRIC")
    monkeypatch.setenv(PARAMS_VARIABLE, '{"num_threads": "4"}')
    config = endpoint_config(parse_options(["--model-path", "m"]), 1 << 20)
    assert (config.nixl_plugin, dict(config.nixl_params)) == ("LIBFABRIC", {"num_threads": "4"})


@pytest.mark.parametrize(
    ("flags", "pool_bytes", "staging", "slot"),
    [
        ([], 4 << 20, 4 << 20, 1 << 20),
        ([], (4 << 20) + 1, 5 << 20, 5 << 18),
        ([], 1 << 40, 64 << 20, 8 << 20),
        (["--kv-staging-mib", "256"], 4 << 20, 256 << 20, 8 << 20),
        (["--kv-staging-mib", "0"], 4 << 20, 0, 1),
    ],
)
def test_staging_memory_is_no_larger_than_the_pool_unless_it_is_asked_for(
    flags: list[str], pool_bytes: int, staging: int, slot: int
) -> None:
    config = endpoint_config(parse_options(["--model-path", "m", *flags]), pool_bytes)
    assert (config.staging_bytes, config.staging_slot_bytes) == (staging, slot)
    validate.config(config)


def test_transfer_flags_reach_the_endpoint() -> None:
    flags = ["--disaggregation-mode", "decode", "--kv-strategy", "merge", "--kv-digest", "--kv-quarantine-mib", "3"]
    config = endpoint_config(parse_options(["--model-path", "m", *flags]), 1 << 30)
    assert (config.strategy, config.digest, config.quarantine_cap) == ("merge", True, 3 << 20)
    plain = endpoint_config(parse_options(["--model-path", "m"]), 1 << 30)
    assert (plain.strategy, plain.digest, plain.quarantine_cap) == ("auto", False, None)


@pytest.mark.parametrize("tp", [3, 8])
def test_a_tp_size_that_does_not_divide_the_heads_is_refused(
    tp: int, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-path", str(tiny), "--tp-size", str(tp)]) == 2
    assert f"--tp-size {tp} does not divide the model's 4 attention heads" in capsys.readouterr().err


def test_each_start_is_another_incarnation() -> None:
    first, second = (parse_options(["--model-path", "m"]).incarnation for _ in range(2))
    assert first != second


def test_a_taken_port_is_said_at_once_and_not_after_loading(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(options: object) -> None:
        raise AssertionError("the ranks are started")

    monkeypatch.setattr("pdtransfer.engines.reference.main.RankGroup", loads)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(AssertionError, match="the ranks are started"):  # with a port that is free
            main(["--model-path", str(tiny), "--port", "0"])
    finally:
        signal.signal(signal.SIGTERM, before)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--model-path", str(tiny), "--port", str(port)]) == 2
    assert f"--port {port} can not be listened on" in capsys.readouterr().err
