"""Folders in an object store, through fsspec."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from ckptlint.errors import AccessError, NothingToCheckError
from ckptlint.model import FileState
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.storage.listing import FolderEntry, Listing
from ckptlint.storage.paths import is_safe, shown
from ckptlint.storage.remote_folder import RemoteFolder
from ckptlint.storage.requests import filesystem, is_absent, listed, reason, with_retries

_LONG_LISTING = 64 * 1024**2  # bytes of the answers to one listing that patience is kept for


class ObjectFolder(RemoteFolder):
    """All keys of an object store below a prefix; `path` is bucket and prefix, without a slash at the end."""

    def __init__(self, protocol: str, path: str) -> None:
        super().__init__()
        self.protocol, self.path = protocol, path
        self._subs: dict[str, ObjectFolder] = {}
        self._sizes: dict[str, int] = {}

    @property
    def display(self) -> str:
        return shown("/".join(filter(None, (f"{self.protocol}://{self.path}", self.part))))

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @cached_property
    def parent(self) -> Folder | None:
        above, _, name = self.path.rpartition("/")
        if not above:
            return None
        folder = ObjectFolder(self.protocol, above)
        folder._subs[name] = self
        return folder

    def sub(self, name: str) -> Folder:
        if name not in self._subs:
            inner = self._subs[name] = ObjectFolder(self.protocol, f"{self.path}/{name}")
            inner.parent = self
        return self._subs[name]

    @cached_property
    def _infos(self) -> list[dict[str, Any]]:
        """What one listing says, page after page."""
        try:
            return with_retries(partial(listed, self.protocol, self.path), _LONG_LISTING)
        except Exception as error:
            if is_absent(error):
                raise NothingToCheckError(f"{self.display} does not exist") from None
            raise AccessError(f"{self.display} cannot be listed: {reason(error, self.protocol)}") from None

    @property
    def is_file(self) -> bool:
        """Whether the path is a key itself, and no prefix of keys."""
        only = self._infos[0] if len(self._infos) == 1 else {}
        return only.get("type") == "file" and only["name"].endswith("/" + self.name)

    @cached_property
    def entries(self) -> Listing:
        entries = {}
        for info in self._infos:
            inside = info["name"].startswith(self.path + "/")
            if not inside and "//" in self.path:
                raise AccessError(f"{self.display} cannot be listed: the library drops a slash from it")
            name = info["name"][len(self.path) + 1 :] if inside else info["name"].rpartition("/")[2]
            name = name.rstrip("/")
            if name:  # a key that ends in a slash marks a folder; one with `//` has a folder without a name
                is_folder = info["type"] == "directory"
                if info["size"] is None and not is_folder:
                    raise AccessError(f"{printable(name)} in {self.display} has no known size")
                entries[name] = FolderEntry(0 if is_folder else int(info["size"]), is_folder)
        return Listing.of(entries.items())

    @property
    def sums(self) -> Mapping[str, str]:
        """The checksums that the Hub lists; huggingface_hub 2.4 HfFileSystem.ls: `lfs` of a large file has `sha256`."""
        large = {info["name"].rpartition("/")[2]: info.get("lfs") for info in self._infos}
        return {name: str(lfs["sha256"]) for name, lfs in large.items() if isinstance(lfs, Mapping) and "sha256" in lfs}

    def absent_hint(self, relative: str) -> str:
        if hint := super().absent_hint(relative):
            return hint
        is_doubled = any(info["type"] == "directory" and info["name"] == self.path + "/" for info in self._infos)
        why = "an upload joined its prefix with one slash too many"
        return f"copy the keys with `//` to names with one slash: {why}" if is_doubled else ""

    def size(self, name: str) -> int:
        if name in self.entries:
            return self.entries[name].size
        state, size = self.stat(name)
        if state != "ok" or size is None:
            raise AccessError(f"{printable(name)} in {self.display} cannot be read: it is missing")
        return size

    def stat(self, relative: str) -> tuple[FileState, int | None]:
        if not is_safe(relative):
            return "unsafe-path", None
        if relative in self.entries:
            entry = self.entries[relative]
            return ("not-a-file", None) if entry.is_folder else ("ok", entry.size)
        if relative in self._sizes:
            return "ok", self._sizes[relative]
        if "/" not in relative or relative.endswith("/"):
            return "absent", None
        store = filesystem(self.protocol)
        try:
            info = with_retries(lambda: store.info(f"{self.path}/{relative}"))
        except Exception as error:
            if is_absent(error):
                return "absent", None
            what = f"{printable(relative)} in {self.display}"
            raise AccessError(f"{what} cannot be accessed: {reason(error, self.protocol)}") from None
        if info["type"] != "file":
            return "not-a-file", None
        self._sizes[relative] = int(info["size"])
        return "ok", self._sizes[relative]

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        from fsspec import AbstractFileSystem

        store = filesystem(self.protocol)
        # where a store has no ranged read of its own (Hugging Face), fsspec would read megabytes ahead
        reads_ahead = not store.async_impl and type(store).cat_file is AbstractFileSystem.cat_file
        exactly = {"cache_type": "none"} if reads_ahead else {}
        data: bytes = store.cat_file(f"{self.path}/{name}", start=start, end=stop, **exactly)
        return data
