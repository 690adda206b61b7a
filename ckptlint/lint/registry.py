"""Finding the rules: every `Rule` object in the modules of `ckptlint.rules`, and of plug-ins."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from ckptlint.analysis.needs import NEEDS
from ckptlint.errors import ConfigError
from ckptlint.rule import Rule

GROUP = "ckptlint.rules"
"""The entry-point group in which an installed package names the package of its rules."""

FAMILIES = {
    "CFG": "the tensors against the configuration of the model",
    "COM": "common state, run markers, step numbers",
    "EXP": "experts",
    "GEO": "the chunks of one tensor",
    "LIV": "what nodes see, and contents against a seal",
    "LNT": "ckptlint itself",
    "NAM": "names of keys",
    "OBJ": "objects of Megatron-Core",
    "OPT": "optimizer states against their parameters",
    "PAY": "payload files and the records in them",
    "QNT": "quantised weights, their scales and what is declared",
    "REF": "against a reference (--expect)",
    "RNK": "sets of files, one for each rank",
    "RUN": "against the step before",
    "SAF": "what is unsafe or cannot be read",
    "SHP": "shapes of tensors against each other",
}
"""The letters that codes of ckptlint itself begin with, and what the rules of each family are about."""


@cache
def load_rules() -> tuple[Rule, ...]:
    """All rules, by code."""
    return tuple(sorted(_rules_in(rules_package()), key=lambda rule: rule.code))


def with_plugins(rules: Sequence[Rule], named: Iterable[str] = (), barred: Iterable[Path] = ()) -> tuple[Rule, ...]:
    """The rules and those of plug-ins, by code: of the packages that are `named` or installed under `GROUP`.

    Nothing is imported from checked folders (`barred`).

    Raises:
        ConfigError: a plug-in cannot be imported, holds no rule, or one whose code or name is not its own to use.
    """
    known, barred = list(rules), tuple(barred)
    for name in dict.fromkeys([*_installed(barred), *named]):
        try:
            new = [rule for rule in _rules_in(_imported(name, barred)) if rule not in rules]
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever the code of others ends in
            raise ConfigError(f"the plug-in {name} cannot be imported: {type(error).__name__}: {error}") from error
        if not new:
            raise ConfigError(f"the plug-in {name} holds no rule")
        for rule in new:
            if problem := _clash(rule, known):
                raise ConfigError(f"the plug-in {name} cannot be used: {problem}")
            known.append(rule)
    return tuple(sorted(known, key=lambda rule: rule.code))


def _installed(barred: Iterable[Path]) -> Iterator[str]:
    """The packages that installed distributions name, those below a checked folder left out."""
    if not any(map(_may_name, sys.path)):
        return
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.dist is None or not _is_below(Path(str(entry.dist.locate_file(""))), barred):
            yield entry.value


def _may_name(place: str) -> bool:
    """Whether a place that packages come from may hold plug-ins: importing what knows for sure takes 20 ms."""
    try:
        return _names_rules(place or ".", Path(place).stat().st_mtime_ns)
    except NotADirectoryError:  # an archive
        return True
    except OSError:
        return False


@cache
def _names_rules(place: str, _changed: int) -> bool:
    """Whether a distribution in a folder names plug-ins; asked again when one was installed since."""
    with os.scandir(place) as listing:
        described = [entry.path for entry in listing if entry.name.endswith((".dist-info", ".egg-info"))]
    for path in described:
        # a Path takes longer than the read
        with suppress(OSError), open(f"{path}/entry_points.txt", "rb") as file:  # noqa: PTH123
            if f"[{GROUP}]".encode() in file.read().replace(b" ", b""):
                return True
    return False


def _imported(name: str, barred: Iterable[Path]) -> ModuleType:
    if not all(word.isidentifier() for word in name.split(".")):
        raise ConfigError(f"{name!r} is not a plug-in: name an importable package, not a path")
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        raise ConfigError(f"the plug-in {name} is not installed where ckptlint is")
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    if any(_is_below(Path(place), barred) for place in places):
        raise ConfigError(f"the plug-in {name} lies inside a checked path, and ckptlint imports nothing from there")
    return importlib.import_module(name)


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in folders)


def _rules_in(package: ModuleType) -> list[Rule]:
    """The rules in a package and its modules, or in a module; each once. Raises ValueError for needs that are none."""
    inner = pkgutil.iter_modules(getattr(package, "__path__", ()))
    modules = [package, *(importlib.import_module(f"{package.__name__}.{module.name}") for module in inner)]
    rules = list(dict.fromkeys(item for module in modules for item in vars(module).values() if isinstance(item, Rule)))
    for code, word in ((rule.code, word) for rule in rules for word in rule.needs):
        if word not in NEEDS:
            raise ValueError(f"{code} needs {word!r}, which is not one of {', '.join(NEEDS)}")
    return rules


def _clash(rule: Rule, others: Iterable[Rule]) -> str:
    """Why a plug-in's rule cannot be used; "" when it can."""
    if not re.fullmatch(r"[A-Z]{3}\d{3}", rule.code):
        return f"the code {rule.code!r} is not three capitals and three digits"
    if rule.code[:3] in FAMILIES:
        return f"codes of the family {rule.code[:3]} belong to ckptlint, and {rule.code} is one"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name):
        return f"the name {rule.name!r} of {rule.code} may have only small letters, digits and hyphens"
    for rival in others:
        if rule.code == rival.code:
            return f"there are two rules {rule.code}: {rival.name} and {rule.name}"
        if rule.name == rival.name:
            return f"{rule.code} and {rival.code} are both named {rule.name}"
    return ""


def rules_package() -> ModuleType:
    """The package of the rules that come with ckptlint, and of the causes beside them."""
    try:
        return importlib.import_module("ckptlint.rules")
    except ModuleNotFoundError:
        # a clone that was not installed: the rules lie beside the package
        folder = Path(__file__).parents[2] / "rules"
        places = [str(folder)]
        spec = importlib.util.spec_from_file_location(
            "ckptlint.rules", folder / "__init__.py", submodule_search_locations=places
        )
        if spec is None or spec.loader is None:
            raise
        package = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = package
        spec.loader.exec_module(package)
        return package
