"""Live mode: the verdict inside a running job, on what its ranks hold. See docs/live.md.

This package is the only part of ckptlint that imports torch, and only once one of these names is used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckptlint.live.api import LiveError, LiveNotInstalled, check, install, uninstall
    from ckptlint.live.hooks.dcp import SaveLint, patch_dcp
    from ckptlint.live.hooks.frameworks import LightningCheck, accelerate_hook
    from ckptlint.live.hooks.megatron import patch_mcore
    from ckptlint.live.sealing import Pending, check_loaded, prepare_seal, seal

_HOMES = {
    "ckptlint.live.api": ("LiveError", "LiveNotInstalled", "check", "install", "uninstall"),
    "ckptlint.live.hooks.dcp": ("SaveLint", "patch_dcp"),
    "ckptlint.live.hooks.frameworks": ("LightningCheck", "accelerate_hook"),
    "ckptlint.live.hooks.megatron": ("patch_mcore",),
    "ckptlint.live.sealing": ("Pending", "check_loaded", "prepare_seal", "seal"),
}

__all__ = ["LiveError", "LiveNotInstalled", "check", "install", "uninstall"]
__all__ += ["LightningCheck", "SaveLint", "accelerate_hook", "patch_dcp", "patch_mcore"]
__all__ += ["Pending", "check_loaded", "prepare_seal", "seal"]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
