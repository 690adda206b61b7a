"""CONTRIBUTING and the plug-in template, followed by someone who does what stands there, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import REAL, REPOSITORY, sweep_only

from ckptlint.lint.registry import FAMILIES

CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEMPLATE = REPOSITORY / "docs" / "plugin-template"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what a rule needs, the real checkpoints as a link; rules and fixtures are found as in a package."""
    for name in ("ckptlint", "rules", "fixtures", "docs", "tests", "bench"):
        ignore = shutil.ignore_patterns("__pycache__", "real", "make")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignore)
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "fixtures" / "real").symlink_to(REPOSITORY / "fixtures" / "real")
    for name in ("rules", "fixtures"):
        (tmp_path / "ckptlint" / name).symlink_to(tmp_path / name)
    return tmp_path


@sweep_only
def test_a_new_rule_is_two_files_and_three_commands(clone: Path) -> None:
    section = re.split(r"^## ", CONTRIBUTING.split("## A new rule\n")[1], flags=re.MULTILINE)[0]
    files = re.findall(r"^```\w+\n# (\S+/\S+)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert [Path(name).parent.name for name, _ in files] == ["rules", "fixtures"]
    for name, text in files:
        (clone / name).write_text(text, encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    tools = clone / "bin"
    tools.mkdir()
    for name, module in (("python", ""), ("pytest", "-m pytest"), ("ckptlint", "-m ckptlint")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    make, test, explain = commands.splitlines()
    printed = {}
    for command in (make, test, explain):
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed[command] = done.stdout
    code = Path(files[1][0]).stem
    assert int(re.findall(r"(\d+) passed", printed[test])[0]) >= 4
    assert printed[explain].startswith(f"{code} empty-part\n")
    there = f"[{code}]({code[:3]}.md#{code.lower()}-empty-part)"
    assert there in (clone / "docs" / "rules" / "README.md").read_text(encoding="utf-8")
    changed = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "docs").rglob("*.md")
        if path.read_text(encoding="utf-8") != (clone / path.relative_to(REPOSITORY)).read_text(encoding="utf-8")
    }
    assert changed == {"docs/rules/README.md", f"docs/rules/{code[:3]}.md"}, (
        "two new rules would conflict in these pages"
    )


def test_what_the_reference_says_of_plugins_is_what_the_template_has() -> None:
    text = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    page = text.split("### Plug-ins\n")[1].split("\n## ")[0]
    families = page.split("families of ckptlint itself")[1].split(")")[0]
    assert set(re.findall(r"\b[A-Z]{3}\b", families)) == set(FAMILIES)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (rule,) = (path for path in (TEMPLATE / "acme_ckpt_rules").glob("acm*.py"))
    assert "ckptlint explain wide-float" in commands and rule.stem.endswith("wide_float")
    assert all((TEMPLATE / name).exists() for name in re.findall(r"`([\w/.-]+/)`", page))


@sweep_only
def test_a_new_framework_is_one_file_of_data_and_two_fixtures(clone: Path) -> None:
    section = re.split(r"^## ", CONTRIBUTING.split("## A new framework\n")[1], flags=re.MULTILINE)[0]
    ((name, text),) = re.findall(r"^```toml\n# (\S+)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (clone / "fixtures" / "real").unlink()
    world = clone / "fixtures" / "real" / "frameworks"
    world.mkdir(parents=True)
    rows = (REAL / "frameworks" / "MANIFEST.tsv").read_text(encoding="utf-8").splitlines()[:1]
    for run, verdict, codes, latest in (
        ("acme", "healthy", "", "snap@20"),
        ("acme_broken", "broken", "COM001", "snap@10"),
        ("acme_torn", "broken", "COM001", "snap@10"),
    ):
        for step in (10, 20):
            saved = REAL / "frameworks" / "trackers" / "link" / f"step-{step}"
            shutil.copytree(saved, world / run / f"snap@{step}" / "net")
            (world / run / f"snap@{step}" / "complete.json").write_text("{}")
        (world / run / "newest.txt").write_text("snap@20")
        rows.append("\t".join((run, verdict, codes, latest, "torch", "acme 1.2", "an invented framework")))
    (world / "acme_broken" / "snap@20" / "saving").write_text("")
    (world / "acme_torn" / "snap@20" / "complete.json").unlink()
    (world / "MANIFEST.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")

    def tested() -> str:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-rA", "tests/loaders/test_world.py", "-k", "acme"]
        env = os.environ | {"PYTHONPATH": str(clone)}
        return subprocess.run(command, cwd=clone, env=env, capture_output=True, encoding="utf-8", check=False).stdout

    without = tested()
    (clone / name).write_text(text, encoding="utf-8")
    assert (without.count("FAILED "), without.count("PASSED ")) == (3, 3)  # read by content, not known as steps
    whole = tested()
    assert (whole.count("FAILED "), whole.count("PASSED ")) == (0, 6), whole
