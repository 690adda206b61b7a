"""From what the user named to a folder: a local path, or a URL when it has a scheme."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from ckptlint.errors import AccessError, ConfigError, NothingToCheckError
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.storage.local import ABSENT, LocalFolder
from ckptlint.storage.object_store import ObjectFolder
from ckptlint.storage.paths import is_url, shown
from ckptlint.storage.requests import WEB, filesystem
from ckptlint.storage.web_server import WebFolder


def folder_at(path: str) -> tuple[Folder, str]:
    """The folder that a path means, and the name of the file in it where the path names a file.

    Raises:
        NothingToCheckError: nothing lies there.
        AccessError: the operating system, the store or the network refused.
        ConfigError: a URL of a scheme that cannot be read, or for which a package is missing.
    """
    if is_url(path):
        from ckptlint.storage.locate import remote_at

        return remote_at(path)
    place = Path(path.removeprefix("file://"))
    try:
        is_folder = stat.S_ISDIR(place.stat().st_mode)
    except ValueError:  # a NUL
        raise NothingToCheckError(f"{printable(path)} does not exist") from None
    except OSError as error:
        if error.errno in ABSENT:
            raise NothingToCheckError(f"{printable(path)} does not exist") from None
        raise AccessError(f"{printable(path)} cannot be looked at: {error.strerror}") from None
    return (LocalFolder(place), "") if is_folder else (LocalFolder(place.parent), place.name)


_FILES = re.compile(r".*\.(metadata|distcp|json|safetensors|pt|yaml)")


def remote_at(url: str) -> tuple[Folder, str]:
    """The folder that a URL means, and the name of the file in it where the URL names a file.

    Raises:
        ConfigError: fsspec does not know the scheme, or a package for it is missing.
        NothingToCheckError: nothing lies there.
        AccessError: the store refused, or could not be reached.
    """
    protocol, path = url.split("://", 1)
    protocol = protocol.lower()
    if "::" in url:
        raise ConfigError(f"{shown(url)} chains file systems, which ckptlint does not follow")
    filesystem(protocol)
    if protocol in WEB:
        parts = urlsplit(url)
        folder = WebFolder(f"{protocol}://{parts.netloc}{parts.path}".rstrip("/"), parts.query)
        if _FILES.fullmatch(folder.name):
            return WebFolder(folder.url.rpartition("/")[0], parts.query), folder.name
        return folder, ""
    path = path.rstrip("/")
    if not path:
        raise ConfigError(f"{shown(url)} names no bucket")
    place = ObjectFolder(protocol, path)
    parent = place.parent
    if parent is not None and place.is_file:
        return parent, place.name
    return place, ""
