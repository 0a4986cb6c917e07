"""The OCI writer and the project's image."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from e2e.cluster import image_set, pod_env, shares
from e2e.cluster.errors import ClusterError
from e2e.cluster.image_set import ProjectFolders
from e2e.cluster.oci import Image, ImageConfig, Tree


def _tree() -> Tree:
    tree = Tree()
    tree.file("etc/passwd", "root:x:0:0::/:/bin/sh\n")
    tree.symlink("bin", "usr/bin")
    tree.folder("home/nonroot", user=65532, group=65532)
    tree.folder("tmp", 0o1777)
    return tree


def _archive(image: Image) -> dict[str, bytes]:
    buffer = io.BytesIO()
    image.write(buffer)
    buffer.seek(0)
    files = {}
    with tarfile.open(fileobj=buffer) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            files[member.name] = content.read()
    return files


def test_every_blob_is_named_by_its_content() -> None:
    image = Image("local.test/x:1", (_tree().layer(),), ImageConfig(user="65532"))
    files = _archive(image)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    for path, content in files.items():
        if path.startswith("blobs/"):
            assert path == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


def test_the_index_leads_to_config_and_layers() -> None:
    layer = _tree().layer()
    image = Image("local.test/x:1", (layer,), ImageConfig(command=("sh",), user="65532"))
    files = _archive(image)

    def blob(described: dict[str, object]) -> bytes:
        content = files["blobs/" + str(described["digest"]).replace(":", "/")]
        assert described["size"] == len(content)
        return content

    (described,) = json.loads(files["index.json"])["manifests"]
    assert described["digest"] == image.digest()
    assert described["annotations"]["io.containerd.image.name"] == "local.test/x:1"
    manifest = json.loads(blob(described))
    config = json.loads(blob(manifest["config"]))
    assert config["config"]["Cmd"] == ["sh"]
    assert config["config"]["User"] == "65532"
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert blob(manifest["layers"][0]) == layer


def test_a_layer_has_parents_owners_and_links() -> None:
    with tarfile.open(fileobj=io.BytesIO(_tree().layer())) as archive:
        members = {member.name: member for member in archive}
    assert list(members) == sorted(members)
    assert members["etc"].isdir()
    assert members["bin"].linkname == "usr/bin"
    assert members["home/nonroot"].uid == 65532
    assert members["home"].uid == 0
    assert members["tmp"].mode == 0o1777
    assert {member.mtime for member in members.values()} == {0}


def test_the_order_of_additions_does_not_matter() -> None:
    tree = Tree()
    tree.entries = dict(reversed(_tree().entries.items()))
    assert tree.layer() == _tree().layer()


@pytest.mark.parametrize("path", ["", "/", "../etc/passwd", "a/../../b"])
def test_paths_outside_the_image_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        Tree().file(path, b"")


def test_outermost_folders() -> None:
    given = [Path("/usr"), Path("/usr/local"), Path("/opt/venv"), Path("/opt/venv2"), Path("/usr")]
    assert shares.outermost(given) == [Path("/usr"), Path("/opt/venv"), Path("/opt/venv2")]


def test_project_folders_follow_the_environment_to_its_python(tmp_path: Path) -> None:
    for name in ("python/bin", "source", "venv"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {tmp_path}/python/bin\nversion = 3.11.7\n")
    folders = ProjectFolders(tmp_path / "venv", tmp_path / "source")
    assert folders.linked() == [tmp_path / "python"]
    shown = {tmp_path / "venv", tmp_path / "source", tmp_path / "python", tmp_path / "pods"}
    assert shown <= set(folders.shared(tmp_path / "pods"))
    image = image_set.project_image(folders, tmp_path / "pods")
    assert f"PATH=/host{tmp_path}/pods/bin:" in image.config.environment[0]
    with tarfile.open(fileobj=io.BytesIO(image.layers[0])) as archive:
        assert archive.getmember(f"{tmp_path}/python".lstrip("/")).linkname == f"/host{tmp_path}/python"
        assert archive.getmember("usr").linkname == "/host/usr"


def test_every_path_of_the_pods_environment_is_below_host(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    (tmp_path / "source/operator").mkdir(parents=True)
    (venv / "bin/tool").write_text(f"#!{venv}/bin/python\nprint('hello')\n")
    pods = pod_env.make(tmp_path / "pods", venv, tmp_path / "source", Path(sys.base_prefix) / "bin")
    assert (pods / "bin/tool").read_text() == f"#!/host{pods}/bin/python\nprint('hello')\n"
    assert not (pods / "bin/activate").exists()
    assert str((pods / "bin/python").readlink()).startswith(f"/host{sys.base_prefix}/bin/python3")
    (pth,) = pods.glob("lib/python3.*/site-packages/pods.pth")
    lines = pth.read_text().splitlines()
    assert lines[0] == f"/host{tmp_path}/source/operator"
    assert all(line.startswith("/host/") for line in lines)
    assert any(line.startswith(f"/host{venv}/lib/") for line in lines)


def test_an_engines_image_has_its_environment_as_root_and_nothing_of_this_project(tmp_path: Path) -> None:
    for name in ("python/bin", "engine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "engine/pyvenv.cfg").write_text(f"home = {tmp_path}/python/bin\n")
    folders = ProjectFolders(tmp_path / "engine", None)
    assert not any(folder.is_relative_to(Path(__file__).parents[2]) for folder in folders.shared(tmp_path / "pods"))
    image = image_set.engine_image(folders, tmp_path / "pods")
    pinned = (Path(__file__).parents[2] / "hack/sglang/requirements.txt").read_text().splitlines()
    (sglang,) = [line.partition("==")[2] for line in pinned if line.startswith("sglang==")]
    assert image.name == f"pdcluster.local/sglang:v{sglang}-cpu"
    assert image.config.user == "0:0"
    assert f"PATH=/host{tmp_path}/pods/bin:" in image.config.environment[0]


def test_an_environment_without_a_source_tree_shows_packages_only(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    pods = pod_env.make(tmp_path / "pods", venv, None, Path(sys.base_prefix) / "bin")
    (pth,) = pods.glob("lib/python3.*/site-packages/pods.pth")
    (line,) = pth.read_text().splitlines()
    assert line.startswith(f"/host{venv}/lib/python3.")


def test_a_python_below_usr_comes_with_usr(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    folders = ProjectFolders(tmp_path / "venv", tmp_path)
    assert folders.linked() == []
    assert tmp_path in folders.shared(tmp_path / "pods")


def test_no_environment_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no virtual environment") as caught:
        ProjectFolders(tmp_path, tmp_path).linked()
    assert "--venv" in caught.value.render()
