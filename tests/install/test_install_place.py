"""The plugin is at its place whole or not at all, whatever was there and whoever is interrupted."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.install.__main__ import main
from pdtransfer.install.bundle import Bundle
from pdtransfer.install.place import holds, place

FILES = {"pdtransfer/__init__.py": b"", "pdtransfer/a/b.py": b"x = 1\n", "pdcluster-1.dist-info/RECORD": b"r1"}
OLD = Bundle(FILES, "1")
NEW = Bundle({"pdtransfer/__init__.py": b"2", "pdcluster-2.dist-info/RECORD": b"r2"}, "2")


def listed(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def installer(target: Path, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdtransfer.install", str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload, no-any-return]


def test_what_is_there_already_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "plugin"
    assert place(OLD, target) is True
    before = {p: p.stat().st_ino for p in target.rglob("*")}
    assert place(OLD, target) is False
    assert {p: p.stat().st_ino for p in target.rglob("*")} == before


@pytest.mark.parametrize("harm", ["changed", "missing", "added", "link"])
def test_what_was_changed_is_put_right(tmp_path: Path, harm: str) -> None:
    target = tmp_path / "plugin"
    place(OLD, target)
    module = target / "pdtransfer/a/b.py"
    if harm == "changed":
        module.write_bytes(b"x = 2\n")
    elif harm == "missing":
        module.unlink()
    elif harm == "added":
        (target / "numpy.py").write_bytes(b"")
    else:
        module.rename(tmp_path / "b.py")
        module.symlink_to(tmp_path / "b.py")
    assert not holds(OLD, target)
    assert place(OLD, target) is True
    assert listed(target) == FILES
    assert not module.is_symlink()


def test_another_version_takes_the_place_of_the_first(tmp_path: Path) -> None:
    place(OLD, tmp_path / "plugin")
    place(NEW, tmp_path / "plugin")
    assert listed(tmp_path) == {f"plugin/{name}": content for name, content in NEW.files.items()}


def test_files_of_others_are_refused_and_stay(tmp_path: Path) -> None:
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"plugin holds other files than pdtransfer's"):
        place(OLD, tmp_path / "plugin")
    assert listed(tmp_path) == {"plugin/mine.txt": b"mine"}


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "plugin").mkdir()
    assert place(OLD, tmp_path / "plugin") is True


def test_any_user_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        place(OLD, tmp_path / "plugin")
    finally:
        os.umask(old)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "plugin").rglob("*") if p.is_file()}
    folders = {p.stat().st_mode & 0o777 for p in [tmp_path / "plugin", tmp_path / "plugin/pdtransfer"]}
    assert (modes, folders) == ({0o644}, {0o755})


def test_a_full_volume_leaves_nothing_at_the_place_and_the_next_run_tidies_up(tmp_path: Path) -> None:
    def no_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    target = tmp_path / "plugin"
    failed = installer(target, preexec_fn=no_large_files)
    assert failed.returncode == 1
    assert failed.stderr == "pdtransfer.install failed: [Errno 27] File too large\n"
    assert not target.exists()
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".pdtransfer-")] == []
    assert list(tmp_path.iterdir()) != []  # it had begun
    assert main([str(target)]) == 0
    assert list(tmp_path.iterdir()) == [target]


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    target = tmp_path / "plugin"
    command = [sys.executable, "-m", "pdtransfer.install", str(target)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = sorted(run.communicate(timeout=60)[0].split(" ", 2)[2].split(" /")[0] for run in runs)
    assert told == ["copied to", "is already in"]
    assert [run.returncode for run in runs] == [0, 0]
    assert list(tmp_path.iterdir()) == [target]


def test_it_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "p")]) == 0
    said = capsys.readouterr().out
    count = len(listed(tmp_path / "p"))
    assert f"copied to {tmp_path / 'p'}: {count} files" in said
    assert "compiled, and overlooked by Pythons it is not for: " in said
