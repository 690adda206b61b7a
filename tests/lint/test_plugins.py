"""Rules of other packages: a real installed one, and those that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import REAL, REPOSITORY, run, run_python, sweep_only

from ckptlint.commands import main as cli
from ckptlint.errors import ConfigError
from ckptlint.lint.registry import FAMILIES, load_rules, with_plugins
from ckptlint.testing import write_checkpoint

TEMPLATE = REPOSITORY / "docs" / "plugin-template"

RULE = """
from ckptlint.rule import Finding, Severity, rule

@rule({code!r}, {name!r}, Severity.WARNING)
def check(ckpt):
    yield Finding("found")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template, truly built and installed into a folder of its own, without a network."""
    if tuple(map(int, version("setuptools").split(".")[:2])) < (70, 1):
        pytest.skip("setuptools builds wheels by itself from 70.1 on; the dev extra has it")
    work = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(TEMPLATE, work / "source")
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", work / "site", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [*(work / "site").glob("*.dist-info/entry_points.txt")]
    return work / "site"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return write_checkpoint({"tensors": {"model.w": {"dtype": "float64", "shape": [8]}}}, tmp_path / "wide")


def test_an_installed_plugin_is_used_without_settings(installed: Path, wide: Path) -> None:
    env = {"PYTHONPATH": str(installed)}
    done = run(wide, "--strict", "--format", "json", env=env)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert [item["code"] for item in document["checkpoints"][0]["findings"]] == ["ACM001"]
    assert "ACM001" in document["tool"]["rules"]
    assert run(wide, "--strict", "--ignore", "wide-float", env=env).returncode == 0
    assert run(wide, "--strict", "--select", "ACM", env=env).returncode == 1
    assert run(wide, "--strict").returncode == 0


def test_an_installed_plugin_has_a_page_and_a_row(installed: Path) -> None:
    env = {"PYTHONPATH": str(installed)}
    page = run("explain", "ACM001", env=env).stdout
    assert page.startswith("ACM001 wide-float\n")
    assert "most-bits = 32" in page
    assert "ACM001" in {row["code"] for row in json.loads(run("rules", "--format", "json", env=env).stdout)}


def test_settings_reach_an_option_of_a_plugin(installed: Path, wide: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(installed)}
    file = tmp_path / "settings.toml"
    file.write_text("[rules.wide-float]\nmost-bits = 64\n")
    assert run(wide, "--strict", "--config", file, env=env).returncode == 0
    done = run(wide, "--config", file)  # without the plug-in its rule is unknown
    assert done.returncode == 2
    assert "there is no rule 'wide-float'" in done.stderr


@sweep_only
def test_the_cases_of_the_template_pass(installed: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests"]
    source = installed.parent / "source"
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=source, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_an_installed_plugin_reaches_the_python_api(installed: Path, wide: Path) -> None:
    program = "import sys, ckptlint; print(*[i.code for i in ckptlint.check(sys.argv[1], depth='files').diagnostics])"
    assert run_python(program, wide, env=os.environ | {"PYTHONPATH": str(installed)}).stdout == "ACM001\n"


# ---------------------------------------------------------------- plug-ins that settings name


def test_settings_name_a_package_without_an_entry_point(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "named_rules" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .zzz001 import check")  # found twice, used once
    (package / "zzz001.py").write_text(RULE.format(code="ZZZ001", name="named-rule"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    file = tmp_path / "settings.toml"
    file.write_text('plugins = ["named_rules.inner"]\n')
    result = CliRunner().invoke(cli.cli, [str(wide), "--config", str(file), "--format", "concise"])
    assert "ZZZ001 found" in result.output


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("x = 1", "holds no rule"),
        ("raise RuntimeError('out of order')", "cannot be imported: RuntimeError: out of order"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("def (", "cannot be imported: SyntaxError"),
        (
            RULE.format(code="ZZZ001", name="a-rule").replace("WARNING", "WARNING, needs=('params', 'luck')"),
            "ZZZ001 needs 'luck', which is not one of Megatron-Core, ",
        ),
        (RULE.format(code="ZZ1", name="a-rule"), "'ZZ1' is not three capitals and three digits"),
        (
            RULE.format(code="ZZZ001", name="A rule"),
            "'A rule' of ZZZ001 may have only small letters, digits and hyphens",
        ),
        (RULE.format(code="ZZZ001", name="coverage-hole"), "ZZZ001 and GEO004 are both named coverage-hole"),
        (RULE.format(code="GEO004", name="a-rule"), "codes of the family GEO belong to ckptlint"),
        (RULE.format(code="SAF999", name="a-rule"), "codes of the family SAF belong to ckptlint"),
        (
            RULE.format(code="ZZZ001", name="a-rule") + RULE.format(code="ZZZ001", name="b-rule").replace("check", "b"),
            "there are two rules ZZZ001: a-rule and b-rule",
        ),
    ],
    ids=lambda value: None if "\n" in value else value[:40],
)
def test_a_plugin_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, source: str, sentence: str
) -> None:
    name = f"broken_plugin_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        with_plugins(load_rules(), [name])
    assert sentence in str(raised.value)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["./rules.py", "/etc/rules", "a/b", "rules:check", "", "a..b", "../x"])
def test_a_path_is_no_plugin(name: str) -> None:
    with pytest.raises(ConfigError, match="name an importable package, not a path"):
        with_plugins(load_rules(), [name])


@pytest.mark.parametrize("name", ["no_such_plugin", "no_such.plugin"])
def test_a_plugin_that_is_not_installed_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not installed"):
        with_plugins(load_rules(), [name])


def test_rules_of_ckptlint_in_a_plugin_are_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from ckptlint.lint.registry import load_rules\nborrowed = load_rules()[0]\n"
    (tmp_path / "borrowing_plugin.py").write_text(source + RULE.format(code="ZZZ002", name="own-rule"))
    monkeypatch.syspath_prepend(tmp_path)
    assert {rule.code for rule in with_plugins(load_rules(), ["borrowing_plugin"])} - {
        rule.code for rule in load_rules()
    } == {"ZZZ002"}


def test_every_family_of_ckptlint_is_reserved() -> None:
    assert {rule.code[:3] for rule in load_rules()} <= set(FAMILIES)


# ---------------------------------------------------------------- never from a checkpoint


def test_a_plugin_inside_a_checked_path_is_not_imported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "ckpt"))
    (folder / "evil_plugin.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\n")
    dist = folder / "evil-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[ckptlint.rules]\nevil = evil_plugin\n")
    (folder / "ckptlint.toml").write_text('plugins = ["evil_plugin"]\n')
    env = {"PYTHONPATH": str(folder)}
    done = run(folder, env=env, cwd=folder)
    assert "ckptlint.toml lies inside a checked path, so ckptlint did not read it" in done.stderr
    assert done.returncode == 0, done.stderr
    outside = tmp_path / "settings.toml"
    outside.write_text('plugins = ["evil_plugin"]\n')
    done = run(folder, "--config", outside, env=env)
    assert done.returncode == 2
    assert "evil_plugin lies inside a checked path" in done.stderr
    assert not (tmp_path / "was_here").exists()
