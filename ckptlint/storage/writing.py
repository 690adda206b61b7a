"""The one way in which ckptlint writes a file: whole or not at all, and never through a link of somebody else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ckptlint.errors import ConfigError


def checked_target(path: Path, read: Iterable[str] = (), looks_for_folder: bool = True) -> Path:
    """The path of an output that may be written: a checkpoint may bring a link that leads a report elsewhere.

    `read` is what the command reads. Of the nodes of a job only one may have the folder that is looked for. Raises
    ConfigError for a link, a path behind a link in what the command reads, or one in no folder.
    """
    from ckptlint.storage.paths import is_url  # with numpy, which --help need not wait for

    places = [name.removeprefix("file://") for name in read if not is_url(name) and "\0" not in name]
    folders = [os.path.realpath(place if os.path.isdir(place) else os.path.dirname(place)) for place in places]  # noqa: PTH112, PTH120  no access is no error here
    for parent in path.absolute().parents:
        around = Path(os.path.realpath(parent.parent))
        if os.path.islink(parent) and any(around.is_relative_to(folder) for folder in folders):  # noqa: PTH114
            raise ConfigError(f"{path} lies behind {parent}, a link in a checkpoint: name a folder that is no link")
    if path.is_symlink() and not _is_of_the_system(path):
        raise ConfigError(f"{path} is a link, and ckptlint writes through none: name the file itself")
    if looks_for_folder and not path.parent.is_dir():
        what = "is no folder" if path.parent.exists() else "does not exist: make the folder first"
        raise ConfigError(f"{path} cannot be written: {path.parent} {what}")
    return path


def write_whole(path: Path, text: str, on_disk: bool = False) -> None:
    """Write a file under a fresh name beside it, then rename it; a pipe or a device is written to as it is.

    A link that came to stand there meanwhile is replaced. The mode of a file that is replaced stays. With `on_disk` the
    text is on the disk when this returns. Raises OSError, and leaves nothing behind, where it cannot be written.
    """
    if _is_of_the_system(path) or (path.exists() and not path.is_file()):
        flags = os.O_WRONLY | os.O_APPEND | (0 if _is_of_the_system(path) else os.O_NOFOLLOW)
        with open(os.open(path, flags), "w", encoding="utf-8") as file:  # noqa: PTH123  a number
            file.write(text)
        return
    mode = path.stat().st_mode & 0o777 if path.is_file() and not path.is_symlink() else 0o666
    unfinished = fresh_name(path)
    number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with open(number, "w", encoding="utf-8") as file:  # noqa: PTH123  a number
            file.write(text)
            if on_disk:
                file.flush()
                os.fsync(number)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def fresh_name(path: Path) -> Path:
    """A name beside a file that nobody can have guessed; what is left of it reads as a file that did not end."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")


def _is_of_the_system(path: Path) -> bool:
    """Whether its folder has links of the system alone: /dev/stdout, the /dev/fd/63 of a shell; not /dev/shm."""
    folder = Path(os.path.realpath(path.parent))
    return folder == Path("/dev") or folder.is_relative_to("/proc")
