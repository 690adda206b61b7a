"""What several test files share: the real fixtures, pickles made by hand, and a way to run ckptlint as a user does."""

from __future__ import annotations

import csv
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import ckptlint
from ckptlint.formats import safe_pickle as unpickle
from ckptlint.lint.report import Report

REPOSITORY = Path(__file__).parent.parent
REAL = REPOSITORY / "fixtures" / "real"
SHARED = REPOSITORY.parent / "shared" / "checkpoints"

CM = "torch.distributed.checkpoint.metadata"
CF = "torch.distributed.checkpoint.filesystem"
CP = "torch.distributed.checkpoint.planner"
MT = "megatron.core.dist_checkpointing.strategies.torch"


# ---------------------------------------------------------------- real checkpoints


def manifest(folder: Path) -> list[dict[str, str]]:
    """The rows of the MANIFEST.tsv of a folder; none where there is no such file."""
    path = folder / "MANIFEST.tsv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture
def real_copy(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of a checkpoint of `fixtures/real`."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(REAL / name, tmp_path / name.replace("/", "-")))

    return copy


def found(report: Report, *levels: str) -> list[tuple[str, str, str]]:
    """(code, severity, sentence) of the findings, those of some severities where any are named."""
    listed = [(item.code, item.severity.label, item.title) for item in report.diagnostics]
    return [row for row in listed if not levels or row[1] in levels]


def codes(report: Report, *levels: str) -> set[str]:
    """The codes of the findings, those of some severities where any are named."""
    return {code for code, _, _ in found(report, *levels)}


def check_bytes(data: bytes, folder: Path, name: str = ".metadata") -> Report:
    """The report on a folder whose metadata is these bytes, beside one empty payload file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / "__0_0.distcp").write_bytes(b"")
    return ckptlint.check(folder)


# ---------------------------------------------------------------- ckptlint as a user runs it


def run(*arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """`ckptlint` in a process of its own; `env` is laid over an environment without settings of ckptlint."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("CKPTLINT_") and k not in ("NO_COLOR", "FORCE_COLOR")
    }
    kept |= {"PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    command = [sys.executable, "-m", "ckptlint", *map(str, arguments)]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "cwd": REPOSITORY}
    return subprocess.run(command, env=kept | (env or {}), encoding="utf-8", check=False, **(defaults | options))


def takes_ctrl_c() -> None:
    """For a new process: a shell starts what runs in its background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_python(code: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own; it may crash, hang or run out of memory without harm to the tests."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "cwd": REPOSITORY}
    return subprocess.run(command, encoding="utf-8", check=False, **(defaults | options))


# ---------------------------------------------------------------- pickles opcode by opcode


def text(value: str) -> bytes:
    """The opcode that pushes a text, in the form of protocol 2."""
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """The opcode that pushes an integer of any size."""
    data = pickle.encode_long(value)
    return pickle.LONG4 + struct.pack("<i", len(data)) + data


def named(module: str, name: str, protocol: int = 2) -> bytes:
    """The opcodes that ask for a module's name."""
    if protocol >= 4:
        return text(module) + text(name) + pickle.STACK_GLOBAL
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def stream(*parts: bytes, protocol: int = 2) -> bytes:
    """A whole pickle around the opcodes."""
    return pickle.PROTO + bytes([protocol]) + b"".join(parts) + pickle.STOP


def write_zip(path: Path, data: bytes, prefix: str | None = None) -> Path:
    """A torch.save archive around a `data.pkl`."""
    prefix = path.stem if prefix is None else prefix
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{prefix}/data.pkl", data)
        archive.writestr(f"{prefix}/version", "3\n")
    return path


# ---------------------------------------------------------------- pickles of objects whose classes are not there

_names: dict[tuple[str, str], type] = {}


def name_of(module: str, name: str) -> type:
    """A class that pickles as `module.name`; its instances pickle by NEWOBJ and BUILD."""
    if (module, name) not in _names:
        members = {"stands_for": (module, name), "__getstate__": lambda self: vars(self).get("raw_state", vars(self))}
        _names[module, name] = type(name, (), members)
    return _names[module, name]


class Size(tuple[int, ...]):
    """Pickles as a torch.Size."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return name_of("torch", "Size"), (tuple(self),)


class Call:
    """Pickles as the call of a name: REDUCE."""

    def __init__(self, function: type, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def new(module: str, name: str, **state: Any) -> Any:
    """An object of a class that is not there, with these attributes; `raw_state` is given to BUILD as it is."""
    made = name_of(module, name)()
    made.__dict__.update(state)
    return made


class _Pickler(pickle._Pickler):
    """The pickler of the standard library, which takes the name of a stand-in class at its word."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        key = vars(obj).get("stands_for") if isinstance(obj, type) else None
        if key is None:
            super().save_global(obj, name)
        elif self.proto >= 4:
            self.save(key[0])
            self.save(key[1])
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)
        else:
            self.write(pickle.GLOBAL + f"{key[0]}\n{key[1]}\n".encode())
            self.memoize(obj)

    dispatch = pickle._Pickler.dispatch | {type: lambda self, obj: self.save_global(obj)}


def dumped(value: Any, protocol: int = 4) -> bytes:
    """The pickle of an object made with `new`, `Size`, `Call` and built-in values."""
    file = BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.fixture(params=["opcode by opcode", "in columns"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: metadata is read by the unpickler alone, and with its regular stretches as columns."""
    monkeypatch.setattr(unpickle, "WORTHWHILE", 0 if request.param == "in columns" else 1 << 60)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that a payload would create, from a child process too; the test fails when it is there at the end."""
    path = tmp_path / "was_here"
    monkeypatch.setattr(sys.modules[__name__], "TRACE", path)
    yield path
    assert not path.exists(), "a payload was run"


TRACE: Path | None = None


def payload(*arguments: Any) -> Any:
    """What a malicious pickle calls through a name that can truly be imported; it leaves a trace."""
    if TRACE is not None:
        TRACE.write_text(repr(arguments))
    return payload
