"""Paths and URLs as text: what they name, what is safe to open, what is safe to print."""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath

from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern

_PLAIN = lazy_pattern(r"\w[\w.-]*", re.ASCII)
_URL = lazy_pattern(r"([A-Za-z][A-Za-z0-9+.:-]+)://")


def is_url(path: str) -> bool:
    """Whether a path names something behind a scheme; `file://` is a local path.

    >>> is_url("s3://bucket/step"), is_url("runs/step"), is_url("C:\\\\runs")
    (True, False, False)
    """
    match = _URL.match(path)
    return match is not None and match[1].lower() not in ("file", "local")


def shown(path: str) -> str:
    """A path or URL as text that is safe to print: without user, password and query, which may hold a signature.

    >>> shown("https://user:secret@host/step?X-Amz-Signature=abc"), shown("az://models@account/step")
    ('https://host/step', 'az://models@account/step')
    """
    if not _URL.match(path):
        return printable(path)
    scheme, _, rest = path.partition("://")
    is_web = scheme.lower() in ("http", "https")
    rest = re.sub(r"[?#].*" if is_web else r"\?[^/?]*=.*", "", rest, flags=re.DOTALL)
    place, slash, key = rest.partition("/")
    user, _, host = place.rpartition("@")
    return printable(f"{scheme}://{host if is_web or ':' in user else place}{slash}{key}")


def is_safe(relative: str) -> bool:
    """Whether a stored path stays inside the folder by its own text: not absolute, no `..`, no drive, no NUL."""
    if _PLAIN.fullmatch(relative):
        return True
    views = PurePosixPath(relative), PureWindowsPath(relative)
    return bool(relative) and "\0" not in relative and not any(p.is_absolute() or ".." in p.parts for p in views)
