"""Scripts are read as bash runs them: each is run by bash with a program in python's place that tells what it got."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.contract.sglang_cli import CommandUnreadable, read_commands

LAUNCH = "python -m sglang.launch_server"
SCRIPTS = [
    f"{LAUNCH} --tp 2",
    f"({LAUNCH} --tp 2) &\nwait",
    f"{{ {LAUNCH} --tp 2; }}",
    f"if true; then {LAUNCH} --tp 2; fi",
    f"run() {{\n  {LAUNCH} --tp 2\n}}\nrun",
    f"for i in 1; do {LAUNCH} --tp 2 & done; wait",
    f"case prefill in prefill) {LAUNCH} --tp 2 ;; esac",
    f"{LAUNCH} --tp 2 # two ranks, don't change\n",
    f"{LAUNCH} \\\n  --tp 2 \\\n  --name 'a # b' --x a#b # end",
    f"{LAUNCH} --tp ${{TP:-2}} --pp ${{PP-1}} --host ${{HOST_NAME:=0.0.0.0}}",
    f"TP=4\n{LAUNCH} --tp ${{TP:-2}} --x ${{TP:+set}} --y ${{NOT_SET_XX:+set}}",
    f"EMPTY=\n{LAUNCH} --a ${{EMPTY:-x}} --b \"${{EMPTY-x}}\" --c $EMPTY --d",
    f"MORE=\"--tp 2 --page-size 64\"\n{LAUNCH} $MORE",
    f"MORE=\"--tp 2\"\n{LAUNCH} --name \"$MORE\"",
    f"MORE=\"--tp 2\"\nMORE=\"$MORE --dp 4\"\nMORE+=' --x'\n{LAUNCH} $MORE",
    f"ARGS=(--tp 2 --json '{{\"a\": 1}}')\nARGS+=(--x \"a b\")\n{LAUNCH} \"${{ARGS[@]}}\" --last",
    f"ARGS=(\n  --tp 2   # two\n  --page-size 64\n)\n{LAUNCH} \"${{ARGS[@]}}\"",
    f"ARGS=()\n{LAUNCH} \"${{ARGS[@]}}\" --tp 2",
    f"A=(--x 1)\nB=(\"${{A[@]}}\" --y 2)\n{LAUNCH} \"${{B[@]}}\"",
    f"{LAUNCH} \"$@\" --tp 2 $*",
    f"{LAUNCH} --a \"\" --b '' --c \"x\"'y'z",
    f"{LAUNCH} --a \\\"q\\\" --b \"\\$X \\\\ \\n\" --c '$X' --d a\\ b",
    f"{LAUNCH} --tp 2 > /dev/null.x 2>&1; true",
    f"{LAUNCH} --tp 2 2>/dev/null",
    f"{LAUNCH} --tp 2 2 > /dev/stderr",
    f"export SGLANG_A=1; SGLANG_B=2\nSGLANG_C=3 {LAUNCH} --tp 2",
    f"SGLANG_A=1\nexport SGLANG_A\n{LAUNCH} --tp 2",
    f"set -a\nSGLANG_A=1\nset +x\n{LAUNCH} --tp 2",
    f"declare -x SGLANG_A=1\ndeclare SGLANG_B=2\n{LAUNCH} --tp 2",
    f"env SGLANG_A='x y' {LAUNCH} --tp 2",
    f"SGLANG_A=1 \\\nSGLANG_B=$HOME_XX/y \\\n{LAUNCH} --tp 2".replace("$HOME_XX", "z"),
    f"N=1\nexport SGLANG_A=$N-x\n{LAUNCH} --tp $N$N",
    f"bash -c '{LAUNCH} --tp 2'",
    f"X=2; bash -c \"{LAUNCH} --tp $X\"",
    f"{LAUNCH} --tp 2\t--dp\t4   ;",
    f"true && {LAUNCH} --tp 2 || true",
    f"! {LAUNCH} --tp 2 | cat",
    f"{LAUNCH} --json {{\"a\":1}}",
    f"A='--tp 2'\n{LAUNCH} x${{A}}y",
]  # fmt: skip
NOT_KNOWN = [
    f"{LAUNCH} --host $(hostname -i) --tp 2",
    f"{LAUNCH} --host `hostname -i`",
    f"{LAUNCH} --port $((8000 + 1))",
    f"{LAUNCH} --host ${{NAME%%.*}}",
    f"if false; then TP=4; fi\n{LAUNCH} --tp $TP",
    f"case x in\n y) export SGLANG_A=1 ;;\nesac\n{LAUNCH} --tp 2",
]
"""Scripts of which only the shell knows some part."""


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `python` that prints what it is started with."""
    assert shutil.which("bash")
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable} -SE\nimport json, os, sys\n"
        "env = {k: v for k, v in os.environ.items() if k.startswith('SGLANG_')}\n"
        f"print(json.dumps([sys.argv[1:], env]), file=open({str(folder / 'told')!r}, 'a'))\n"
    )
    program.chmod(0o755)
    return folder


def told_by_bash(folder: Path, script: str) -> list[Any]:
    """(arguments, environment) of each start of the program; what bash says where there was none."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=folder, capture_output=True, timeout=30, check=False, text=True
    )
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else [done.stderr]


def told_here(script: str) -> list[Any]:
    return [
        [["-m", "sglang.launch_server", *c.arguments], {k: v for k, v in c.environment.items() if k[:7] == "SGLANG_"}]
        for c in read_commands(script)
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_read_as_bash_runs_it(bash: Path, script: str) -> None:
    assert told_here(script) == told_by_bash(bash, script)
    assert all(c.shell_only == () for c in read_commands(script))


@pytest.mark.parametrize("script", NOT_KNOWN)
def test_what_only_the_shell_knows_is_left_as_it_is_written(bash: Path, script: str) -> None:
    (command,) = read_commands(script)
    assert command.shell_only or "$SGLANG_A" in command.environment.values()
    ((arguments, _),) = told_by_bash(bash, script)
    assert len(arguments) in (len(command.arguments) + 2, len(command.arguments) + 1)  # an empty value vanishes


def test_a_comment_between_continued_lines_ends_the_command_in_bash_and_is_noted_here(bash: Path) -> None:
    script = f"{LAUNCH} \\\n  --tp 2 \\\n  # --page-size 64 \\\n  --host 0.0.0.0\n"
    ((arguments, _),) = told_by_bash(bash, script)
    assert arguments[2:] == ["--tp", "2"]
    (command,) = read_commands(script)
    assert command.arguments == ("--tp", "2", "--host", "0.0.0.0")
    assert command.notes[0].startswith("the line before --host does not end with a backslash")


def test_a_setting_that_is_not_exported_is_noted() -> None:
    (command,) = read_commands(f"SGLANG_DISAGG_STAGING_BUFFER=1\n{LAUNCH} --tp 2")
    assert command.environment == {} and "SGLANG_DISAGG_STAGING_BUFFER is set but not exported" in command.notes[0]


SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Of a machine that stands still for a second nothing is said here."""
WORDS = st.lists(
    st.one_of(
        st.sampled_from(["--tp", "2", "'a b'", '"a  b"', "a\\ b", "$V", '"$V"', "$E", '"$E"', "${V}x", "'$V'", "a'b'"]),
        st.text("ab-=#. ", min_size=1, max_size=4),
    ),
    max_size=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(words=WORDS)
def test_random_words_are_split_as_bash_splits_them(bash: Path, words: list[str]) -> None:
    script = f"V='x  y'\nE=\n{LAUNCH} --name {' '.join(words)}"
    assert told_here(script) == told_by_bash(bash, script)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab-=$'\"\\ \n;&|<>#{}()[]@*`:+\t\xa0"), max_size=40))
def test_no_text_is_read_without_end_or_with_another_error(text: str) -> None:
    for whole in (text, f"{LAUNCH} {text}"):
        try:
            read_commands(whole)
        except CommandUnreadable as error:
            assert str(error)


ENDLESS = [
    "\n" * 200_000,
    " \n" * 100_000 + "x",
    "#\n" * 100_000,
    "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 60 + LAUNCH,
    "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + f'{LAUNCH} "${{A[@]}}"',
    "A='x y'\n" + "A+=$A\n" * 60 + f"{LAUNCH} $A",
    f"{LAUNCH} " + "${A:-" * 5000,
    f"{LAUNCH} " + "${A:-" * 5000 + "}" * 5000,
    f"{LAUNCH} " + "$(" * 5000,
    f"{LAUNCH} " + "(" * 100_000,
    f"{LAUNCH} " + "a=(" * 50_000,
    f"{LAUNCH} " + "'" * 100_001,
    "bash -c '" * 10_000,
    f"{LAUNCH} --x\n" * 9000,
]


@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_no_text_takes_longer_than_it_is_long(text: str) -> None:
    began = time.thread_time()  # no wall clock, and no other thread of this process
    with contextlib.suppress(CommandUnreadable):
        read_commands(text)
    assert time.thread_time() - began < 10
