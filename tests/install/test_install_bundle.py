"""What is put beside an engine: our package and its metadata, nothing that could hide a package of the image."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pdtransfer
from pdtransfer.install.bundle import ENTRY_POINTS, Bundle, collect, tagged
from pdtransfer.install.place import place

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pdtransfer.__file__).parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with one of everything that a source tree may hold."""
    root = tmp_path / "source"
    for name in (
        "__init__.py",
        "py.typed",
        "install/pdtransfer_launch.py",
        "staging/_rows.c",
        "staging/_rows.pyi",
        "staging/_rows.cpython-311-x86_64-linux-gnu.so",
        "staging/_bare.so",
        "__pycache__/__init__.cpython-311.pyc",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def ask(code: str, *folders: Path) -> object:
    """What a new interpreter with these folders on its path prints, from JSON."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env, cwd=folders[0], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_only_our_names_lie_on_the_engines_path(tmp_path: Path) -> None:
    place(collect(PACKAGE, "1.2"), tmp_path / "plugin")
    assert {p.name for p in (tmp_path / "plugin").iterdir()} == {
        "pdtransfer",
        "pdtransfer_launch.py",
        "pdcluster-1.2.dist-info",
    }


def test_python_source_and_tagged_extensions_are_taken(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffixes = [".cpython-311-x86_64-linux-gnu.so", ".abi3.so", ".so"]
    monkeypatch.setattr("pdtransfer.install.bundle.EXTENSION_SUFFIXES", suffixes)
    bundle = collect(package, "1")
    assert {n for n in bundle.files if n.startswith("pdtransfer/")} == {
        "pdtransfer/__init__.py",
        "pdtransfer/py.typed",
        "pdtransfer/install/pdtransfer_launch.py",
        "pdtransfer/staging/_rows.pyi",
        "pdtransfer/staging/_rows.cpython-311-x86_64-linux-gnu.so",
    }
    assert bundle.compiled == ("pdtransfer/staging/_rows.cpython-311-x86_64-linux-gnu.so",)
    assert bundle.skipped == ("pdtransfer/staging/_bare.so",)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("_rows.cpython-311-x86_64-linux-gnu.so", True),
        ("_rows.cpython-312-x86_64-linux-gnu.so", False),
        ("_rows.cpython-311-x86_64-linux-musl.so", False),
        ("_rows.abi3.so", True),
        ("_rows.so", False),
    ],
)
def test_an_extension_must_name_the_python_it_is_for(name: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    suffixes = [".cpython-311-x86_64-linux-gnu.so", ".abi3.so", ".so"]
    monkeypatch.setattr("pdtransfer.install.bundle.EXTENSION_SUFFIXES", suffixes)
    assert tagged(name) is wanted


def test_pythons_own_metadata_finds_the_entry_point(tmp_path: Path) -> None:
    place(collect(PACKAGE, "1.2"), tmp_path / "plugin")
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps([[e.name, e.value, e.dist.version] for e in m.entry_points(group='sglang.srt.plugins')]))"
    )
    assert ask(code, tmp_path / "plugin") == [["pdcluster", "pdtransfer.engines.sglang.plugin:register", "1.2"]]


def test_ours_is_found_instead_of_one_that_the_image_has_itself(tmp_path: Path) -> None:
    place(collect(PACKAGE, "1.2"), tmp_path / "plugin")
    theirs = tmp_path / "image" / "pdcluster-0.0.1.dist-info"
    theirs.mkdir(parents=True)
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: pdcluster\nVersion: 0.0.1\n")
    (theirs / "entry_points.txt").write_text("[sglang.srt.plugins]\npdcluster = old:register\n")
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps([e.value for e in m.entry_points(group='sglang.srt.plugins')]))"
    )
    assert ask(code, tmp_path / "plugin", theirs.parent) == ["pdtransfer.engines.sglang.plugin:register"]
    assert ask(code, theirs.parent) == ["old:register"]  # so the image's could have been found


def test_the_package_is_imported_from_there_and_only_with_packages_an_engine_has(tmp_path: Path) -> None:
    place(collect(PACKAGE, "1.2"), tmp_path / "plugin")
    code = (
        "import json, sys; before = set(sys.modules); "
        "import pdtransfer.session.endpoint, pdtransfer.sidecar.rank_link; "
        "top = {n.partition('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(json.dumps([pdtransfer.__file__, sorted(t for t in top if not t.startswith('_'))]))"
    )
    path, packages = ask(code, tmp_path / "plugin")  # type: ignore[misc]
    assert path == str(tmp_path / "plugin" / "pdtransfer" / "__init__.py")
    # pydantic and numpy are what SGLang itself requires; the others come with pydantic.
    pydantics = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert set(packages) <= {"pdtransfer", "numpy", *pydantics}


def test_the_record_holds_every_file_with_its_hash(tmp_path: Path) -> None:
    bundle = collect(PACKAGE, "1.2")
    place(bundle, tmp_path / "plugin")
    rows = list(csv.reader((tmp_path / "plugin" / bundle.record).read_text().splitlines()))
    assert {row[0] for row in rows} == {
        p.relative_to(tmp_path / "plugin").as_posix() for p in (tmp_path / "plugin").rglob("*") if p.is_file()
    }
    for name, told, size in rows:
        if name == bundle.record:
            assert (told, size) == ("", "")
            continue
        content = (tmp_path / "plugin" / name).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert (told, size) == (f"sha256={digest}", str(len(content))), name


def test_pip_finds_the_same_entry_point() -> None:
    """Who installs the package with pip gets what the init container gives."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["sglang.srt.plugins"]
    assert "[sglang.srt.plugins]\n" + "".join(f"{k} = {v}\n" for k, v in group.items()) == ENTRY_POINTS


def test_a_bundle_names_its_record() -> None:
    assert Bundle({}, "3.4").record == "pdcluster-3.4.dist-info/RECORD"
