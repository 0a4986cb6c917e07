"""`pdcluster preflight` on two command lines, for people without the operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from preflight_kit import DECODE, KNOWN, PREFILL, Run, failing, refuses_model_config, unknown, warned

from pdoperator.cli import main

# Two command lines


def test_two_lines_that_fit_exit_0(run: Run, config: str) -> None:
    code, out = run("--prefill-args", PREFILL, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 0 and failing(out) == set() and unknown(out) == set(), out["findings"]
    assert out["verdict"] == "Pass"
    assert set(out) == {"verdict", "findings", "prefill", "decode"}
    assert out["decode"]["facts"]["page_size"] == 16
    assert out["decode"]["facts"]["geometry"]["kv_heads"] == 2


@pytest.mark.parametrize(
    "prefill, decode, rule",
    [
        ("--tp 3", "--tp 2", "A3"),
        ("--page-size 64", "", "B1"),
        ("--kv-cache-dtype fp8_e4m3", "", "B3"),
        ("", "--disaggregation-transfer-backend mooncake", "H1"),
        ("", "--host 127.0.0.1", "H5"),
        ("--speculative-algorithm EAGLE --speculative-draft-model-path d", "", "C2"),
        ("", "--pp-size 2", "A8"),
        ("--tp 2", "--enable-hierarchical-cache", "E2"),
    ],
)
def test_lines_that_do_not_fit_exit_1_and_name_the_rule(
    run: Run, config: str, prefill: str, decode: str, rule: str
) -> None:
    args = ("--prefill-args", f"{PREFILL} {prefill}", "--decode-args", f"{DECODE} {decode}")
    code, out = run(*args, "--model-config", config, *KNOWN)
    assert code == 1 and rule in failing(out)


def test_sglangs_default_backend_is_found_by_the_rules(run: Run, config: str) -> None:
    # Neither line names a backend: both run Mooncake, which fits.
    args = [line.replace("--disaggregation-transfer-backend nixl ", "") for line in (PREFILL, DECODE)]
    code, out = run("--prefill-args", args[0], "--decode-args", args[1], "--model-config", config, *KNOWN)
    assert code == 0 and out["prefill"]["facts"]["backend"] == "Mooncake"


def test_a_variable_of_the_line_is_a_fact(run: Run, config: str) -> None:
    line = f"SGLANG_DISAGGREGATION_NIXL_BACKEND=LIBFABRIC {PREFILL}"
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "H2" in failing(out)


def test_files_hold_command_lines_and_configs(run: Run, config: str, tmp_path: Path) -> None:
    script, settings = tmp_path / "p.sh", tmp_path / "d.yaml"
    script.write_text("#!/bin/bash\nexport TP=2\n" + PREFILL.replace(" --", " \\\n  --") + " --tp $TP\n")
    settings.write_text("tp-size: 2\n")
    args = ("--prefill-args", f"@{script}", "--decode-args", f"{DECODE} --config {settings}")
    code, out = run(*args, "--model-config", config, *KNOWN)
    assert code == 0
    assert [out[r]["facts"]["tensor_parallel"] for r in ("prefill", "decode")] == [2, 2]
    assert out["prefill"]["source"] == str(script)


def test_one_script_that_starts_both_sides_is_read_for_each(run: Run, config: str, tmp_path: Path) -> None:
    script = tmp_path / "both.sh"
    script.write_text(f"export TP=2\n{PREFILL} --tp $TP &\nTP=1\n{DECODE} --tp $TP &\nwait\n")
    args = ("--prefill-args", f"@{script}", "--decode-args", f"@{script}")
    code, out = run(*args, "--model-config", config, *KNOWN)
    assert code == 0
    assert [out[r]["facts"]["tensor_parallel"] for r in ("prefill", "decode")] == [2, 1]
    script.write_text(f"{PREFILL}\n{PREFILL}\n")
    code, said = run(*args)
    assert code == 2 and "it holds 2 commands of SGLang, and 2 of them with --disaggregation-mode prefill" in said


def test_what_is_not_read_is_named(run: Run, config: str) -> None:
    line = f"{PREFILL} --log-level debug --trust-remote-code --future-flag 3 --tp_size 2"
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, "--gpu", "SM90")
    assert out["prefill"]["notChecked"] == ["--log-level", "--trust-remote-code"]
    found = [f["message"] for f in out["findings"] if f["rule"] == "EngineFlag"]
    assert len(found) == 2 and "not checked: --future-flag" in found[0] and "--tp-size" in found[1]
    # Another version may have such a flag; the version that the rules are from has not.
    assert code == 0 and "EngineFlag" in unknown(out)
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "EngineFlag" in failing(out)


def test_a_value_that_only_a_plugin_can_bring_is_unknown(run: Run, config: str) -> None:
    args = ("--prefill-args", f"{PREFILL} --attention-backend mine", "--decode-args", DECODE)
    code, out = run(*args, "--model-config", config, *KNOWN)
    (found,) = [f for f in out["findings"] if f["rule"] == "EngineFlag"]
    assert code == 0 and found["status"] == "Unknown" and "--attention-backend mine" in found["message"]


def test_what_sglang_refuses_fails(run: Run) -> None:
    code, out = run("--prefill-args", f"{PREFILL} --tp many", "--decode-args", DECODE.replace("--model-path m ", ""))
    messages = " ".join(f["message"] for f in out["findings"] if f["rule"] == "EngineFlag")
    assert code == 1 and "invalid int value: 'many'" in messages and "decode: --model-path is missing" in messages


def test_swapped_lines_are_told(run: Run) -> None:
    code, out = run("--prefill-args", DECODE, "--decode-args", PREFILL)
    found = [f for f in out["findings"] if f["rule"] == "Role"]
    assert code == 1 and len(found) == 2 and "swap the two command lines" in found[0]["action"]


def test_a_line_without_a_mode_is_told(run: Run) -> None:
    code, out = run("--prefill-args", "--model-path m", "--decode-args", DECODE)
    assert code == 1 and "Role" in failing(out)


@pytest.mark.parametrize(
    "line",
    [
        f"({PREFILL} --tp 2) &",
        f"{PREFILL} --tp 2 # two ranks, don't change",
        f"{PREFILL} --tp ${{TP:-2}}",
        f'MORE=(--tp 2)\n{PREFILL} "${{MORE[@]}}" "$@"',
        f"MORE='--tp 2'\n{PREFILL} $MORE",
        f"ssh node1 '{PREFILL} --tp 2'",
        f"```bash\n{PREFILL} --tp 2\n```",
    ],
)
def test_a_line_as_scripts_have_it_is_read(run: Run, config: str, line: str) -> None:
    lines = ("--prefill-args", line, "--decode-args", f"{DECODE} --tp 2", "--model-config", config, *KNOWN)
    code, out = run(*lines)
    assert code == 0 and failing(out) == unknown(out) == set(), out["findings"]
    assert out["prefill"]["facts"]["tensor_parallel"] == 2


def test_values_that_only_the_shell_knows_matter_where_a_rule_reads_them(run: Run, config: str) -> None:
    line = f"{PREFILL} --node-rank $1 --dist-init-addr $(hostname -i):5000 --mem-fraction-static ${{MEM}}"
    lines = ("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    code, out = run(*lines)
    assert code == 0 and unknown(out) == set() and "--dist-init-addr" in out["prefill"]["notChecked"]
    code, out = run("--prefill-args", f"{PREFILL} --page-size $P", *lines[2:])
    assert code == 0 and {"ShellVariable", "B1"} <= unknown(out)


def test_what_a_shell_reads_otherwise_is_warned_of(run: Run, config: str) -> None:
    script = PREFILL.replace(" --host", " \\\n  # --tp 2 \\\n  --host")
    lines = ("--prefill-args", script, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    code, out = run(*lines)
    assert code == 0 and "Shell" in warned(out)
    code, out = run("--prefill-args", f"SGLANG_DISAGG_STAGING_BUFFER=1\n{PREFILL}", *lines[2:])
    assert "Shell" in warned(out) and out["prefill"]["facts"]["staging_buffer"] is False


@pytest.mark.parametrize(
    "more",
    ["--api-key one hunter2", "--admin-api-key=one hunter2", "HF_TOKEN=hunter2", "--a=hunter2", "--nope hunter2"],
)
def test_what_may_be_a_secret_is_not_repeated(run: Run, more: str) -> None:
    code, out = run("--prefill-args", f"{PREFILL} {more}", "--decode-args", DECODE, "--engine-version", "0.5.23")
    assert code == 1 and "EngineFlag" in failing(out) and "hunter2" not in str(out)


def test_one_host_makes_loopback_fine(run: Run, config: str) -> None:
    args = [line.replace("--host 0.0.0.0 ", "") for line in (PREFILL, DECODE)]
    lines = ("--prefill-args", args[0], "--decode-args", args[1], "--model-config", config, *KNOWN)
    assert "H5" in warned(run(*lines)[1])  # on one machine it works, which nobody told
    code, out = run(*lines, "--same-host")
    assert code == 0 and out["verdict"] == "Pass"
    mixed = ("--prefill-args", args[0], "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert "H5" in failing(run(*mixed)[1])


def test_overrides_of_the_model_change_its_geometry(run: Run, config: str) -> None:
    line = PREFILL + """ --json-model-override-args '{"num_hidden_layers": 2}'"""
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 1 and "B7" in failing(out)
    assert out["prefill"]["facts"]["geometry"]["layers"] == 2


def test_a_value_that_only_the_shell_knows_is_named(run: Run, config: str) -> None:
    line = PREFILL.replace("0.0.0.0", "$POD_IP")
    code, out = run("--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN)
    assert code == 0 and {"ShellVariable", "H5"} <= unknown(out)
    assert out["prefill"]["facts"].get("host") is None


@pytest.mark.parametrize(
    "prefill, why",
    [
        ("vllm serve m", "it holds no command of SGLang"),
        (f"{PREFILL} --tp $TP", "only its shell knows the value of --tp-size"),
        (f"{PREFILL} $MORE", "only its shell knows what $MORE is"),
        (f"{PREFILL} --disaggregation-mode $ROLE", "only its shell knows the value of --disaggregation-mode"),
        (f"{PREFILL} --disaggregation-transfer-backend $B", "only its shell knows the value of"),
        (f"{PREFILL} 'x", "a quote does not close"),
        ("@/nonexistent/p.sh", "/nonexistent/p.sh can not be read"),
        (f"{PREFILL} --config /nonexistent/c.yaml", "/nonexistent/c.yaml can not be read"),
        (f"{PREFILL} --config c.json", "SGLang takes files that end in .yaml or .yml"),
        (f"{PREFILL} --config", "--config needs one file"),
        (f"{PREFILL} --config $CONFIG", "only its shell knows which file --config names"),
        (f'{PREFILL} "${{MORE[@]}}"', "only its shell knows what ${MORE[@]} is"),
    ],
)
def test_a_line_that_can_not_be_read_exits_2_and_says_which(run: Run, prefill: str, why: str) -> None:
    code, said = run("--prefill-args", prefill, "--decode-args", DECODE)
    assert code == 2 and why in said and ("prefill" in said or "/nonexistent/p.sh" in said)


@pytest.mark.parametrize("content, why", [("{", "Expecting"), ("[]", "object"), ("{}", "num_hidden_layers")])
def test_a_model_config_that_can_not_be_read_exits_2(run: Run, tmp_path: Path, content: str, why: str) -> None:
    refuses_model_config(run, tmp_path, content, why)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--prefill-args", "x"],
        ["--server", "h:1"],
        ["-f", "x", "--server", "h:1"],
    ],
)
def test_half_a_question_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["preflight", *argv])
    assert end.value.code == 2 and "needed" in capsys.readouterr().err


def test_the_text_names_rule_action_and_sides(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{PREFILL} --page-size 64 --log-level debug"
    code = main(["preflight", "--prefill-args", line, "--decode-args", DECODE, "--model-config", config, *KNOWN])
    said = capsys.readouterr().out
    assert code == 1 and said.startswith("pair: Fail")
    assert "B1" in said and "no rule of fit reads: --log-level" in said and "backend NIXL" in said
