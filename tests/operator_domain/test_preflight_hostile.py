"""`pdcluster preflight` on input that is meant to break it: an answer, or exit 2 with one line that says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preflight_kit import DECODE, KNOWN, PREFILL, Run, Serve, both, failing, pair, refuses_model_config, unknown

from pdoperator.cli import main
from pdoperator.cli_http import BadURL, server_url
from real_answers import answer

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)
"""Eight to the twelfth values in half a kilobyte."""


@pytest.mark.parametrize(
    "content, why",
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 5000, "digits"),
        ('{"num_hidden_layers": NaN}', "num_hidden_layers"),
    ],
    ids=["list", "object", "number", "NaN"],
)
def test_a_model_config_of_any_shape_exits_2(run: Run, tmp_path: Path, content: str, why: str) -> None:
    refuses_model_config(run, tmp_path, content, why)


@pytest.mark.parametrize(
    "content, why",
    [
        ("x: &a {y: *a}", "holds itself"),
        ("x: &a [*a]", "holds itself"),
        (LAUGHS, "too large"),
        ("[" * 3000, "nested too deeply"),
        ("x: {y: 2020-01-01}", "its key x holds what JSON does not have"),
        ("x: 2020-13-41", "is not YAML"),
        ("a: 1\n---\nb: 2", "2 documents"),
        ("a: !!python/name:os.system x", "is not YAML"),
    ],
    ids=["map", "list", "laughs", "deep", "date", "no date", "documents", "code"],
)
def test_a_config_file_of_any_shape_exits_2(run: Run, tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    code, said = run("--prefill-args", f"{PREFILL} --config {file}", "--decode-args", DECODE)
    assert code == 2 and why in said and "prefill's command line" in said


@pytest.mark.parametrize("content", ["x: &a [*a]", LAUGHS, "[" * 3000, "[" * 3000 + "]" * 3000])
def test_a_manifest_of_any_shape_exits_2(run: Run, tmp_path: Path, content: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(content)
    code, said = run("-f", str(file))
    assert code == 2 and str(file) in said


@pytest.mark.parametrize("name", ["@", "@/dev/zero", "@a\0b", "@" + "x" * 5000, "@."])
def test_a_name_that_is_no_readable_file_exits_2(run: Run, name: str) -> None:
    code, said = run("--prefill-args", name, "--decode-args", DECODE)
    assert code == 2 and said.startswith("pdcluster preflight: ")


@pytest.mark.parametrize("model", ["m" * 5000, "a/" * 3000, "'a\0b'"])
def test_a_model_path_that_no_file_can_have_is_a_name(run: Run, model: str) -> None:
    lines = [line.replace("--model-path m", f"--model-path {model}") for line in (PREFILL, DECODE)]
    code, out = run("--prefill-args", lines[0], "--decode-args", lines[1], *KNOWN)
    assert code == 0 and "B7" not in failing(out)


@pytest.mark.parametrize("flag", ["--tp 0", "--tp -2", "--pp-size 0", "--page-size 0", "--dcp-size 0"])
def test_a_size_that_no_engine_has_fails(run: Run, flag: str) -> None:
    code, out = run("--prefill-args", f"{PREFILL} {flag}", "--decode-args", f"{DECODE} {flag}", *KNOWN)
    found = [f["message"] for f in out["findings"] if f["rule"] == "EngineFlag" and f["status"] == "Fail"]
    assert code == 1 and len(found) == 2 and "SGLang does not start with it" in found[0]


@pytest.mark.parametrize("flag", ["--tp", "--pp-size", "--attn-dp-size", "--attn-cp-size", "--dcp-size", "--dp-size"])
@pytest.mark.parametrize("size", [10**12, 10**30])
def test_a_size_beyond_all_machines_fails_at_once(run: Run, config: str, flag: str, size: int) -> None:
    line = f"{PREFILL} {flag} {size}"
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "EngineFlag" in failing(out)


@pytest.mark.parametrize("flags", ["--tp 65536", "--pp-size 65536", "--tp 65536 --attn-dp-size 65536"])
def test_the_largest_sizes_take_no_time_worth_telling(run: Run, config: str, flags: str) -> None:
    lines = ("--prefill-args", f"{PREFILL} {flags}", "--decode-args", f"{DECODE} {flags} --page-size {10**30}")
    began = time.process_time()
    code, out = run(*lines, "--model-config", config, *KNOWN)
    assert code == 1 and "B1" in failing(out) and time.process_time() - began < 5


@pytest.mark.parametrize(
    "body, why",
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":"\xff"}', "no JSON"),
        (json.dumps(answer("decode_server_info") | {"page_size": 0}).encode(), "its page size can not be 0"),
        (json.dumps(answer("decode_server_info") | {"tp_size": -1}).encode(), "its tensor parallel can not be -1"),
    ],
    ids=["list", "object", "latin-1", "page 0", "TP -1"],
)
def test_a_server_that_answers_nonsense_exits_2_at_once(run: Run, serve: Serve, body: bytes, why: str) -> None:
    prefill, _ = pair(serve)
    broken = serve({"/server_info": (200, body)})
    code, said = run(*both(prefill, broken), "--timeout", "300")
    assert code == 2 and broken.url in said and why in said and "Traceback" not in said


@pytest.mark.parametrize("body", [b"[[" * 100_000, b"garbage", b"[]", b'{"attn_tp_size": 2}'])
def test_a_bootstrap_port_where_something_else_answers_exits_2(run: Run, serve: Serve, body: bytes) -> None:
    code, said = run(*both(*pair(serve, route=(200, body))), "--timeout", "300")
    assert code == 2 and "prefill's bootstrap server" in said


def test_a_number_that_is_none_leaves_json_that_can_be_read(run: Run, serve: Serve) -> None:
    code, out = run(*both(*pair(serve, decode={"hicache_ratio": float("nan")})))
    assert code == 0 and "hicache_ratio" not in out["decode"]["facts"]
    assert json.loads(json.dumps(out, allow_nan=False))


@pytest.mark.parametrize("key", ["two\nhunter2", "hunter2 two", "\u20ac hunter2"])
def test_a_key_that_no_header_can_have_is_not_repeated(
    run: Run, serve: Serve, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PDCLUSTER_API_KEY", key)
    servers = pair(serve)
    code, said = run(*both(*servers))
    assert code == 2 and "PDCLUSTER_API_KEY" in said and "hunter2" not in said
    assert servers[0].asked == servers[1].asked == []


def test_the_end_of_a_line_behind_a_key_is_left_out(run: Run, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCLUSTER_API_KEY", "secret\n")
    servers = pair(serve)
    assert run(*both(*servers))[0] == 0
    assert {key for _, key in servers[0].asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    "url",
    ["http://u:hunter2@h:99999", "ftp://u:hunter2@h", "u:hunter2@h:x", "http://u:hunter2@[z]:1", "http://u:hun/ter2@h"],
)
def test_no_message_about_a_url_repeats_its_password(url: str) -> None:
    with pytest.raises(BadURL) as error:
        server_url(url)
    assert "hunter2" not in str(error.value) and "ter2" not in str(error.value)


@pytest.mark.parametrize("url", ["http://a b:1", "http://h\r\nX: y:1", "http://" + "a" * 300, "http://h:0", "http://*"])
def test_an_address_that_no_server_has_is_refused_before_it_is_asked(url: str) -> None:
    with pytest.raises(BadURL):
        server_url(url)


@pytest.mark.parametrize(
    "argv, why",
    [
        (["-f", "x", "--gpu", "sm90"], "--gpu has no effect with -f"),
        (["-f", "x", "--engine-version", "1"], "--engine-version has no effect with -f"),
        (["--server", "a", "--server", "b", "--same-host"], "--same-host has no effect with --server"),
        (
            ["--prefill-args", "x", "--decode-args", "y", "--timeout", "3"],
            "--timeout has no effect with --prefill-args",
        ),
        (["--prefill-args", "@-", "--decode-args", "@-"], "standard input can be read for one of them only"),
        (["-f", "-", "--model-config", "-"], "standard input can be read for one of them only"),
    ],
)
def test_an_option_without_effect_is_refused(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["preflight", *argv])
    assert end.value.code == 2 and why in capsys.readouterr().err


def preflight(*argv: str | bytes, **more: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "pdoperator.cli", "preflight", *argv]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, env={**os.environ, **more})


def test_names_that_the_terminal_can_not_show_are_shown_escaped() -> None:
    prefill = PREFILL.replace(" m ", " m\u00e9 ").encode() + b" --served-model-name n\xff"
    done = preflight("--prefill-args", prefill, "--decode-args", DECODE, PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and b"m\\xe9" in done.stdout and done.stderr == b""


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "pdoperator.cli", "preflight", "--prefill-args", PREFILL, "--decode-args", DECODE]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writing)
    assert done.returncode == 141 and done.stderr == b""


def test_an_unknown_fact_of_a_name_is_no_crash(run: Run) -> None:
    code, out = run("--prefill-args", PREFILL + " --served-model-name \udcff", "--decode-args", DECODE)
    assert code == 0 and "A22" in unknown(out)
