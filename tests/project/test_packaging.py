"""What is released: the wheel holds the package and nothing else. That it works alone is seen by .ci/build."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path

import pytest
from support import REPOSITORY

import ckptlint

pytestmark = pytest.mark.ci

SOURCES = {"ckptlint": "ckptlint", "rules": "ckptlint/rules", "fixtures": "ckptlint/fixtures"}
SUFFIXES = {".py", ".json", ".typed", ".css", ".jinja", ".toml"}
INFO = f"ckptlint-{ckptlint.__version__}.dist-info"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, without a network."""
    pytest.importorskip("build.env", reason="needs build, which the ci extra brings")  # a folder `build` is no package
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77 in this environment: the test builds without a network")
    work = tmp_path_factory.mktemp("built")
    for name in SOURCES:
        shutil.copytree(REPOSITORY / name, work / name, ignore=shutil.ignore_patterns("__pycache__", "real", "make"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, work)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return work / "dist"


def expected() -> set[str]:
    """The files that a user needs, as they lie in the repository."""
    paths = {
        f"{target}/{path.relative_to(REPOSITORY / source)}": path
        for source, target in SOURCES.items()
        for path in (REPOSITORY / source).rglob("*")
    }
    return {
        name
        for name, path in paths.items()
        if path.suffix in SUFFIXES and not {"real", "make", "__pycache__"} & set(path.parts)
    }


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = message_from_bytes(archive.read(f"{INFO}/METADATA"))
    own = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    assert names == expected() | own | {f"{INFO}/licenses/LICENSE"}
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert [line.partition(">")[0] for line in needed] == ["click", "jinja2", "networkx", "numpy", "pyyaml", "tabulate"]


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for source, target in SOURCES.items():
        assert {name for name in expected() if name.startswith(f"{target}/") and name.count("/") == 1} <= {
            name.replace(f"{source}/", f"{target}/", 1) for name in names if name.startswith(f"{source}/")
        }
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= names
    assert not any(name.startswith(("fixtures/real", "fixtures/make")) for name in names)
