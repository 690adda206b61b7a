"""Live mode: the verdict inside a running job, on what its ranks hold. docs/live.md tells how.

This package is the only part of ckptlint that imports torch, and only once one of these names is used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckptlint.live.api import LiveError, LiveNotInstalled, check, install, uninstall
    from ckptlint.live.hooks_dcp import SaveLint, patch_dcp

_HOMES = {
    "ckptlint.live.api": ("LiveError", "LiveNotInstalled", "check", "install", "uninstall"),
    "ckptlint.live.hooks_dcp": ("SaveLint", "patch_dcp"),
}

__all__ = ["LiveError", "LiveNotInstalled", "SaveLint", "check", "install", "patch_dcp", "uninstall"]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
