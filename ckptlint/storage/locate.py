"""From what the user named to a folder: a local path, or a URL when it has a scheme."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ckptlint.errors import AccessError, ConfigError, NothingToCheckError
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.storage.local import ABSENT, LocalFolder
from ckptlint.storage.paths import is_url

_listed: ContextVar[tuple[str, Folder] | None] = ContextVar("_listed", default=None)


@contextmanager
def listed_once(path: str, folder: Folder) -> Iterator[None]:
    """Let `folder_at` reach the folders in this one from it: a run is listed once, not for each of its steps."""
    token = _listed.set((path.rstrip("/"), folder))
    try:
        yield
    finally:
        _listed.reset(token)


def folder_at(path: str) -> tuple[Folder, str]:
    """The folder that a path means, and the name of the file in it where the path names a file.

    Raises NothingToCheckError for nothing, AccessError for what the system, the store or the network refuses, and
    ConfigError for an empty path, or a URL of a scheme that cannot be read or lacks a package.
    """
    if not path:
        raise ConfigError("the path is empty: a variable may not be set")
    if is_url(path):
        from ckptlint.storage.requests import reset_time_budget

        reset_time_budget()
    around, (above, _, name) = _listed.get(), path.rpartition("/")
    if around is not None and above == around[0] and name in around[1].entries and around[1].entries[name].is_folder:
        return around[1].sub(name), ""
    if is_url(path):
        from ckptlint.storage.remote import remote_at

        return remote_at(path)
    place = Path(path.removeprefix("file://"))
    try:
        is_folder = stat.S_ISDIR(place.stat().st_mode)
    except ValueError:  # a NUL
        raise NothingToCheckError(f"{printable(path)} does not exist") from None
    except OSError as error:
        if error.errno in ABSENT:
            raise NothingToCheckError(f"{printable(path)} does not exist") from None
        raise AccessError(f"{printable(path)} cannot be accessed: {error.strerror}") from None
    return (LocalFolder(place), "") if is_folder else (LocalFolder(place.parent), place.name)
