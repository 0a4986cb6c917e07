"""Finding SGLang's arguments in what people keep: scripts, container commands, notes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.contract.sglang_cli import CommandUnreadable, read_command, with_config
from pdtransfer.contract.sglang_cli.config_file import ConfigRefused, config_arguments

ABC = {"A": "1", "B": "2", "C": "3"}


@pytest.mark.parametrize(
    "text, arguments, environment",
    [
        ("--tp 2 --page-size 16", ["--tp", "2", "--page-size", "16"], {}),
        ("python -m sglang.launch_server --tp 2", ["--tp", "2"], {}),
        ("/usr/bin/python3 -u -m sglang.launch_server --tp 2", ["--tp", "2"], {}),
        ("sglang serve org/model --tp 2", ["--model-path", "org/model", "--tp", "2"], {}),
        ("sglang serve --model-type llm --model-path m", ["--model-path", "m"], {}),
        ("A=1 B='x y' python -m sglang.launch_server --tp 2", ["--tp", "2"], {"A": "1", "B": "x y"}),
        ("env A=1 numactl -N 0 python -m sglang.launch_server --tp 2", ["--tp", "2"], {"A": "1"}),
        ("A=1 --tp 2", ["--tp", "2"], {"A": "1"}),
        (
            "docker run --gpus all -e A=1 --env=B=2 img python3 -m sglang.launch_server --tp 2",
            ["--tp", "2"],
            {"A": "1", "B": "2"},
        ),
        ("export A=1; python -m sglang.launch_server --tp 2", ["--tp", "2"], {"A": "1"}),
        (
            "export A=1\nexport B=2\n\n# run it\npython -m sglang.launch_server \\\n  --tp 2\n",
            ["--tp", "2"],
            {"A": "1", "B": "2"},
        ),
        (
            # Not exported: a variable of the script, not of its programs.
            "N=4\npython -m sglang.launch_server --tp $N --dp ${N} --pp $(N)",
            ["--tp", "4", "--dp", "4", "--pp", "4"],
            {},
        ),
        ("cd /app && python -m sglang.launch_server --tp 2 2>&1 | tee log", ["--tp", "2"], {}),
        ("python -m sglang.launch_server --tp 2 > out.log 2> err.log &", ["--tp", "2"], {}),
        ("bash -c 'A=1 python -m sglang.launch_server --tp 2'", ["--tp", "2"], {"A": "1"}),
        ("--tp 2\n--page-size 16\n", ["--tp", "2", "--page-size", "16"], {}),
        ("""--hisparse-config '{"top_k": 2; }' --tp 2""", ["--hisparse-config", '{"top_k": 2; }', "--tp", "2"], {}),
        ("python3 /opt/launch.py -m sglang.launch_server --tp 2", ["--tp", "2"], {}),
        ("python sglang/launch_server.py --tp 2", ["--tp", "2"], {}),
        ("sleep 5; python -m sglang.launch_server --tp 2; echo done", ["--tp", "2"], {}),
        ("python -msglang.launch_server --tp 2", ["--tp", "2"], {}),
        ("python -um sglang.launch_server --tp 2", ["--tp", "2"], {}),
        ("ssh node1 'A=1 python -m sglang.launch_server --tp 2'", ["--tp", "2"], {"A": "1"}),
        ('tmux new-session -d "python -m sglang.launch_server --tp 2"', ["--tp", "2"], {}),
        ("srun -N1 bash -c 'ssh n \"python -m sglang.launch_server --tp 2\"'", ["--tp", "2"], {}),
        ("cat > run.sh <<EOF\npython -m sglang.launch_server --tp 2\nEOF\n", ["--tp", "2"], {}),
        ("FROM sglang\nENV A=1 B=2\nENV C 3\nCMD python -m sglang.launch_server --tp 2", ["--tp", "2"], ABC),
        ("# notes\n--tp 2\n# --page-size 32\n\n--page-size 16", ["--tp", "2", "--page-size", "16"], {}),
        ("--tp 2 # two ranks, don't change\n", ["--tp", "2"], {}),
    ],
)
def test_the_command_is_found(text: str, arguments: list[str], environment: dict[str, str]) -> None:
    command = read_command(text)
    assert list(command.arguments) == arguments
    assert dict(command.environment) == environment
    assert command.shell_only == ()


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "it holds no command of SGLang"),
        ("vllm serve m --tp 2", "it holds no command of SGLang"),
        ("--tp 2 'x", "a quote does not close"),
        ("python -m sglang.launch_server --tp 2; python -m sglang.launch_server --tp 1", "it holds 2 commands"),
        ("x" * (1 << 19), "are read at most"),
    ],
)
def test_what_is_no_command_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(CommandUnreadable, match=why):
        read_command(text)


def test_what_only_a_shell_knows_is_kept_as_written() -> None:
    command = read_command("python -m sglang.launch_server --host $POD_IP --tp ${TP} $EXTRA")
    assert command.shell_only == ("$POD_IP", "${TP}", "$EXTRA")


@given(st.text(st.sampled_from("abc-=$'\"\\ \n;&|<>#{}()"), max_size=40))
def test_no_text_makes_it_raise_anything_else(text: str) -> None:
    try:
        read_command("python -m sglang.launch_server " + text)
        read_command(text)
    except CommandUnreadable:
        pass


def test_a_config_file_goes_before_the_command_line() -> None:
    def read(path: str) -> dict[str, object]:
        assert path == "c.yaml"
        return {"tp-size": 4, "enable-hicache": True, "disable-radix-cache": False, "log-requests-target": ["a", "b"]}

    merged = with_config(["--tp", "2", "--config", "c.yaml", "--dp", "1"], read)
    assert merged == [
        *("--tp-size", "4", "--enable-hicache", "--log-requests-target", "a", "b"),
        *("--tp", "2", "--dp", "1"),
    ]


def test_a_glued_config_is_left_alone_as_sglang_leaves_it() -> None:
    def never(path: str) -> dict[str, object]:
        raise AssertionError(path)

    assert with_config(["--config=c.yaml"], never) == ["--config=c.yaml"]


@pytest.mark.parametrize("arguments", [["--config"], ["--config", "a", "--config", "b"]])
def test_a_config_without_a_file_or_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(CommandUnreadable):
        with_config(arguments, lambda path: {})


@pytest.mark.parametrize("config", [{1: 2}, {"enable-tf32-matmul": True}, {"enable-dp-attention": True}])
def test_entries_that_sglang_refuses_are_named(config: dict[str, object]) -> None:
    with pytest.raises(ConfigRefused, match="key"):
        config_arguments(config)
