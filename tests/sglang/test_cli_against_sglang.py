"""What we read of a command line is what SGLang's own parser makes of it: names, kinds, values, facts, refusals."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit_machine import cpu_variables, environment

from pdtransfer.contract.base import Role
from pdtransfer.contract.sglang_cli import (
    BACKENDS,
    BY_DEST,
    CommandUnreadable,
    ConfigRefused,
    Flag,
    command_facts,
    read_flags,
    with_config,
)
from pdtransfer.contract.sglang_cli.flags import FLAGS, OTHERS
from pdtransfer.contract.sglang_cli.kinds import Kind

HERE = Path(__file__).parent
MODEL = ["--model-path", "m"]


class Truth:
    """SGLang's parser in a process of its own environment."""

    def __init__(self) -> None:
        home = environment()
        assert home is not None, "SGLang's environment is not there: run make sglang-env"
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | cpu_variables()
        self._process = subprocess.Popen(
            [str(home / "bin" / "python"), "-W", "ignore", str(HERE / "cli_parser_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
            text=True,
        )
        assert self._answer(120.0) == {"ready": True}

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], seconds)[0], "SGLang's parser does not answer"
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer(30.0)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture(scope="module")
def sglang() -> Iterator[Truth]:
    truth = Truth()
    try:
        yield truth
    finally:
        truth.close()


@pytest.fixture(scope="module")
def table(sglang: Truth) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = sglang.ask(table=True)["table"]
    return rows


KINDS = {"loads": Kind.JSON, "json_list_type": Kind.JSON, "human_readable_int": Kind.TOKENS}


def kind_of(row: dict[str, Any]) -> Kind:
    action, nargs, type_ = row["action"], row["nargs"], row["type"]
    if action == "BooleanOptionalAction":
        return Kind.PAIR
    if nargs == 0:
        return Kind.SWITCH
    if nargs == "+":
        return {"int": Kind.INTS, "float": Kind.FLOATS}.get(type_, Kind.TEXTS)
    if nargs == "*":
        return Kind.MAYBE_TEXTS
    if nargs == "?":
        return Kind.MAYBE_TEXT
    return {"int": Kind.INT, "float": Kind.FLOAT, **KINDS}.get(type_, Kind.TEXT)


def test_the_table_holds_every_flag_of_sglang_with_its_kind(table: list[dict[str, Any]]) -> None:
    real = {}
    for row in table:
        names = [n for n in row["names"] if not (row["action"] == "BooleanOptionalAction" and n.startswith("--no-"))]
        for name in names:
            real[name] = (row["dest"], kind_of(row))
    ours = {name: (f.dest, f.kind) for f in (*FLAGS, *OTHERS) for name in f.names}
    assert ours == real


def test_defaults_and_choices_of_the_flags_that_matter_are_sglangs(table: list[dict[str, Any]]) -> None:
    rows = {name: row for row in table for name in row["names"]}
    for flag in FLAGS:
        row = rows[flag.name]
        if flag.dest != "help":
            assert flag.default == row["default"], flag.name
        assert not flag.choices or sorted(flag.choices) == sorted(row["choices"]), flag.name
    # The backends that we know are SGLang's, and our own, which a plugin adds.
    backends = set(rows["--disaggregation-transfer-backend"]["choices"])
    assert set(BACKENDS) <= backends | {"pdcluster"}


def compare(sglang: Truth, argv: list[str]) -> bool:
    """Asserts that both sides read `argv` alike; whether SGLang took it."""
    real = sglang.ask(argv=argv)
    flags = read_flags(argv)
    if "refused" in real:
        # The choices of flags that no rule reads are not in the table.
        ours = flags.problems or flags.foreign or flags.given("help")
        assert ours or "invalid choice" in real["refused"], (argv, real)
        return False
    values = real["values"]
    assert not flags.problems and not flags.foreign, (argv, flags)
    for dest, value in flags.values.items():
        want = values[dest]
        if dest in ("lora_paths", "enable_amd_monokernel"):
            continue  # Made by actions of SGLang's own; no rule reads them.
        assert value == want or str(value) == str(want), (argv, dest)
    for flag in FLAGS:
        if flag.dest != "help":
            assert flags.get(flag.dest) == values[flag.dest], (argv, flag.dest)
    facts_agree(values, argv)
    return True


def facts_agree(values: dict[str, Any], argv: list[str]) -> None:
    """Facts of the command line against SGLang's own namespace, not against our reading of it."""
    for role in Role:
        facts = command_facts(role, read_flags(argv), {}).facts
        for flag in FLAGS:
            if not flag.fact:
                continue
            want = values[flag.dest]
            if want is None:
                want = flag.unset
            got = getattr(facts, flag.fact)
            if got is None and not read_flags(argv).given(flag.dest):
                continue  # Left to the engine; contract.effective knows what it makes of it.
            assert got == want, (argv, flag.fact)
        backend = values["disaggregation_transfer_backend"]
        if backend in BACKENDS:
            assert facts.backend is BACKENDS[backend]
        kernels = values[f"dsa_{role.value}_backend"]
        assert facts.dsa_backend == kernels
        hisparse, threshold = values["enable_hisparse"], values["disaggregation_decode_host_receive_threshold"]
        assert facts.host_kv == ("HiSparse" if hisparse else "HostReceive" if threshold < 1 else "Off")


VALUES: dict[Kind, tuple[str, ...]] = {
    Kind.INT: ("2", "+3", " 4", "1_000"),
    Kind.TOKENS: ("4096", "32k", "25.6k", "2Ki", "1M"),
    Kind.FLOAT: ("0.5", "1e-1", "1"),
    Kind.TEXT: ("text", "a b", "x=y", "-1"),
}
BAD: dict[Kind, tuple[str, ...]] = {
    Kind.INT: ("x", "1.5", "", "4k"),
    Kind.TOKENS: ("4K", "1.5Ki", "k", "4 k"),
    Kind.FLOAT: ("x", ""),
    Kind.TEXT: (),
}


def good_values(flag: Flag) -> tuple[str, ...]:
    if flag.choices:
        return flag.choices
    if flag.dest == "disaggregation_transfer_backend":
        return tuple(b for b in BACKENDS if b != "pdcluster")
    return REAL_CHOICES.get(flag.dest, VALUES[flag.kind])


REAL_CHOICES = {"quantization": ("fp8",)}
"""Flags whose choices are not in the table, since no rule reads them."""


def spellings(name: str) -> list[str]:
    """The name, and its shortest beginning that no other flag shares, and one character less."""
    others = {n for f in (*FLAGS, *OTHERS) for n in f.names if n != name}
    others |= {"--no-" + n[2:] for f in OTHERS if f.kind is Kind.PAIR for n in f.names}
    for length in range(3, len(name)):
        if not any(o.startswith(name[:length]) for o in others):
            return [name, name[:length], name[: length - 1]]
    return [name]


SCALARS = [f for f in FLAGS if f.dest not in ("help", "config")]


@pytest.mark.parametrize("flag", SCALARS, ids=lambda f: f.dest)
def test_every_spelling_of_a_flag_that_matters_is_read_alike(sglang: Truth, flag: Flag) -> None:
    taken = 0
    for name in flag.names:
        for spelled in spellings(name) if name == flag.name else [name]:
            if flag.kind is Kind.SWITCH:
                lines = [[spelled], [spelled, spelled], [spelled + "=1"], [spelled, "1"]]
            else:
                good = good_values(flag)
                lines = [[spelled, v] for v in good]
                lines += [[f"{spelled}={good[0]}"], [spelled, good[0], spelled, good[-1]]]
                lines += [
                    [spelled],
                    [spelled, "--enable-metrics"],
                    [spelled, good[0], "stray"],
                    [spelled, "--", good[0]],
                ]
                lines += [[spelled, v] for v in BAD[flag.kind]] + [[f"{spelled}={v}"] for v in BAD[flag.kind]]
            lines.append([spelled.replace("-", "_").replace("__", "--", 1), "1"])
            for line in lines:
                argv = line if flag.dest == "model_path" else [*MODEL, *line]
                taken += compare(sglang, argv)
    assert taken >= len(flag.names), "SGLang took none of them: this compared nothing"


def words() -> st.SearchStrategy[list[str]]:
    """One flag with or without its value, a stray value, or what is no flag at all."""

    def of(flag: Flag) -> st.SearchStrategy[list[str]]:
        names = st.sampled_from([s for n in flag.names for s in spellings(n)])
        if not flag.kind.takes_value:
            return names.map(lambda n: [n])
        values = st.one_of(
            st.sampled_from(VALUES.get(flag.kind, VALUES[Kind.TEXT])),
            st.sampled_from(flag.choices or ("1",)),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6),
        )
        return st.tuples(names, values, st.booleans()).map(lambda t: [f"{t[0]}={t[1]}"] if t[2] else [t[0], t[1]])

    flags = [f for f in (*FLAGS, *OTHERS) if f.dest not in ("help", "config")]
    junk = st.sampled_from(
        [["x"], ["--nonsense"], ["-tp", "2"], ["--"], ["-1"], ["--tp_size", "2"], ["--dis"], [""], ["-"]]
    )
    return st.one_of(st.sampled_from(SCALARS).flatmap(of), st.sampled_from(flags).flatmap(of), junk)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.lists(words(), max_size=6))
@example(line=[["--tp", "2"], ["--tensor-parallel-size=4"], ["--attn-dp", "2"]])
def test_random_command_lines_are_read_alike(sglang: Truth, line: list[list[str]]) -> None:
    compare(sglang, [*MODEL, *(word for group in line for word in group)])


def test_a_table_with_a_wrong_entry_would_be_found(sglang: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Flag(("--page-size",), Kind.INT, "page_size", 64)
    monkeypatch.setitem(BY_DEST, "page_size", wrong)
    with pytest.raises(AssertionError):
        compare(sglang, list(MODEL))


CONFIGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"tp-size": 4, "page-size": 16}, []),
    ({"tp-size": 4}, ["--tp-size", "2"]),
    ({"tp_size": 4}, []),
    ({"tensor-parallel-size": 2, "enable-hicache": True, "disable-radix-cache": False}, []),
    ({"enable_hierarchical_cache": True}, []),
    ({"enable-dp-attention": True}, []),
    ({"enable-tf32-matmul": True}, []),
    ({"trust-remote-code": True, "log-requests-target": ["a", "b"]}, []),
    ({"default-chat-template-kwargs": {"a": 1}}, []),
    ({"kv-cache-dtype": "fp8_e4m3", "unknown-key": 1}, []),
    ({"max-total-tokens": "32k", "revision": None}, []),
    ({}, ["--tp", "2"]),
]


@pytest.mark.parametrize("content, more", CONFIGS, ids=lambda v: json.dumps(v)[:40])
def test_a_config_file_is_read_alike(sglang: Truth, tmp_path: Path, content: dict[str, Any], more: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(content))
    for argv in ([*MODEL, "--config", str(file), *more], [*MODEL, *more, "--config", str(file)]):
        real = sglang.ask(argv=argv)
        try:
            merged = with_config(argv, lambda path: yaml.safe_load(Path(path).read_text()))
        except (ConfigRefused, CommandUnreadable):
            assert "refused" in real, argv
            continue
        flags = read_flags(merged)
        assert bool(flags.problems) == ("refused" in real), (argv, flags.problems, real)
        if "values" in real:
            assert all(flags.get(f.dest) == real["values"][f.dest] for f in FLAGS if f.dest != "help")
            facts_agree(real["values"], merged)


def test_a_config_that_is_glued_or_shortened_has_no_effect_in_sglang_and_here(sglang: Truth, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tp-size: 4\n")
    for spelled in ([f"--config={file}"], ["--conf", str(file)]):
        argv = [*MODEL, *spelled]
        assert sglang.ask(argv=argv)["values"]["tp_size"] == 1
        assert read_flags(with_config(argv, lambda path: {"tp-size": 4})).get("tp_size") == 1
