"""NIXL_FACTS.md names, for every fact, tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`([a-z_0-9]+\.py)::(test_[a-z_0-9]+)`")
FACTS = 19


def rows() -> dict[int, str]:
    return {int(number): tests for number, _, _, tests in ROW.findall((HERE / "NIXL_FACTS.md").read_text())}


def defined(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_fact_has_a_row_with_tests() -> None:
    found = rows()
    assert sorted(found) == list(range(1, FACTS + 1))
    assert [number for number, tests in found.items() if not TEST.findall(tests)] == []


def test_every_test_that_is_named_exists() -> None:
    named = [pair for tests in rows().values() for pair in TEST.findall(tests)]
    assert [f"{file}::{name}" for file, name in named if name not in defined(file)] == []


def test_every_test_of_a_numbered_fact_is_in_the_table() -> None:
    table = "".join(rows().values())
    numbered = {n for f in HERE.glob("test_nixl_facts_*.py") for n in defined(f.name) if re.match(r"test_facts?_\d", n)}
    assert len(numbered) > 20 and [name for name in numbered if name not in table] == []
