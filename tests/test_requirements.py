"""hack/requirements.txt is the union of pyproject.toml's extras, and constraints.txt pins each of them."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _lines(name: str) -> set[str]:
    lines = (line.strip() for line in (ROOT / name).read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def _project() -> set[str]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = set(data["build-system"]["requires"]) | set(data["project"]["dependencies"])
    for extra in data["project"]["optional-dependencies"].values():
        found |= {r for r in extra if not r.startswith("pdcluster[")}
    return found


def test_requirements_are_the_union_of_the_extras() -> None:
    assert _lines("hack/requirements.txt") == _project()


def test_every_requirement_is_pinned_without_urls() -> None:
    pins = _lines("constraints.txt")
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+-]+", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    wanted = {re.split(r"[<>=\[; ]", r)[0].lower().replace("_", "-") for r in _project()}
    assert wanted <= pinned
