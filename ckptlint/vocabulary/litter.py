"""Files that an operating system or a tool leaves in any folder: never part of a checkpoint, and no sign of damage."""

from __future__ import annotations

import re

from ckptlint.patterns import lazy_pattern

_LITTER = lazy_pattern(
    r"""\._.+                       # AppleDouble: what macOS, tar and SMB write beside each file on foreign disks
    |\.DS_Store|Thumbs\.db|desktop\.ini|\.directory
    |\.nfs[0-9a-f]{8,}           # deleted on NFS while it was open
    |\..*\.(metadata|distcp|safetensors|json|pt|pth|bin|pkl|txt|yaml)\.[A-Za-z0-9]{6}  # rsync, until it is whole
    |\..+\.sw[a-z]|[^.].*~|\#.+\#|\.\#.+  # editors
    |\.goutputstream-[A-Z0-9]{6}
    |.+\.lock
    """,
    re.VERBOSE,
)

_DOWNLOAD = lazy_pattern(r"(.+?)(\.[\w=-]{20,})?\.(part|partial|crdownload|download|incomplete)")  # that did not end


def downloaded_name(name: str) -> str:
    """The name that a download gives its file at its end, for the name of one that did not end; "" for all else.

    >>> downloaded_name("model.safetensors.incomplete"), downloaded_name("model.safetensors")
    ('model.safetensors', '')
    """
    match = _DOWNLOAD.fullmatch(name)
    return match[1] if match else ""


def is_system_file(name: str) -> bool:
    """Whether a file of this name is known to belong to an operating system, a copying tool or an editor.

    >>> [is_system_file(name) for name in ("._model.safetensors", ".__0_0.distcp.Xy12Ab", ".metadata.backup")]
    [True, True, False]
    """
    return _LITTER.fullmatch(name) is not None or bool(downloaded_name(name))
