"""Finding the rules: every `Rule` object in the modules of `ckptlint.rules`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from ckptlint.rule import Rule

_PACKAGE = "ckptlint.rules"


@cache
def load_rules() -> tuple[Rule, ...]:
    """All rules, by code."""
    package = _package()
    found = [
        item
        for module in pkgutil.iter_modules(package.__path__)
        for item in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values()
        if isinstance(item, Rule)
    ]
    return tuple(sorted(found, key=lambda rule: rule.code))


def _package() -> ModuleType:
    try:
        return importlib.import_module(_PACKAGE)
    except ModuleNotFoundError:
        # a clone that was not installed: the rules lie beside the package
        folder = Path(__file__).parent.parent / "rules"
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
        return package
