"""From a URL to a folder behind it. Imported for URLs alone: the network libraries take their time."""

from __future__ import annotations

from urllib.parse import urlsplit

from ckptlint.errors import ConfigError, NothingToCheckError
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder
from ckptlint.storage.object_store import ObjectFolder
from ckptlint.storage.paths import shown
from ckptlint.storage.requests import PACKAGES, WEB, filesystem
from ckptlint.storage.web_server import WebFolder

_FILES = lazy_pattern(r".*\.(metadata|distcp|json|safetensors|pth?|bin|ckpt|yaml)")


def remote_at(url: str) -> tuple[Folder, str]:
    """The folder that a URL means, and the name of the file in it where the URL names a file.

    Raises ConfigError for a URL that lacks its bucket or host, or whose scheme is unknown or lacks a package,
    NothingToCheckError for nothing, and AccessError for a store that refuses or cannot be reached.
    """
    protocol, path = url.split("://", 1)
    protocol = protocol.lower()
    if "::" in url:
        raise ConfigError(f"{shown(url)} chains file systems, which ckptlint does not follow")
    path = path.rstrip("/")
    if not path or (path.startswith("/") and protocol in PACKAGES):  # in other stores `/` is the root
        what, below = "host" if protocol in WEB else "bucket", path.lstrip("/")
        raise ConfigError(f"{shown(url)} names no {what}: write {shown(f'{protocol}://{what.upper()}/{below}')}")
    filesystem(protocol)
    if protocol in WEB:
        split = urlsplit(url)
        folder = WebFolder(f"{protocol}://{split.netloc}{split.path}".rstrip("/"), split.query)
        if _FILES.fullmatch(folder.name):
            around = WebFolder(folder.url.rpartition("/")[0], split.query, folder.name)
            if not around.has(folder.name):
                raise NothingToCheckError(f"{shown(url)} does not exist")
            return around, folder.name
        return folder, ""
    place = ObjectFolder(protocol, path)
    return (place.parent, place.name) if place.parent is not None and place.is_file else (place, "")
