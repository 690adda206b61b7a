"""Mutants of healthy checkpoints: what one is, how it is written, and how ckptlint judges it."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

from support import REAL, manifest
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

import ckptlint
from ckptlint.depth import Depth
from ckptlint.lint.report import Diagnostic
from ckptlint.rule import Severity

_MEGATRON = {
    "megatron.core.dist_checkpointing.strategies.torch": {
        "MCoreMetadata": type("MCoreMetadata", (Metadata,), {}),
        "MCoreSavePlan": type("MCoreSavePlan", (SavePlan,), {}),
    },
    "megatron.core.enums": {"ModelType": Enum("ModelType", {"encoder_or_decoder": 1})},
    "megatron.core.rerun_state_machine": {"RerunMode": Enum("RerunMode", {"DISABLED": "disabled"}, type=str)},
}
"""The classes of Megatron-Core (0.10 to 0.16) that its files pickle, with the members that occur."""


def megatron_names() -> Any:
    """While entered, files of Megatron-Core can be pickled and unpickled without it."""
    parents = (
        "megatron",
        "megatron.core",
        "megatron.core.dist_checkpointing",
        "megatron.core.dist_checkpointing.strategies",
    )
    modules = {name: ModuleType(name) for name in (*parents, *_MEGATRON)}
    for name, members in _MEGATRON.items():
        for member in members.values():
            member.__module__ = name
            setattr(modules[name], member.__name__, member)
    return patch.dict(sys.modules, modules)


Kind = Literal["metadata", "ranks", "headers"]


@dataclass(frozen=True)
class Save:
    """A healthy checkpoint.

    Attributes:
        name: its path below `fixtures/real`.
        step: the folder of its metadata.
        top: what is copied: the run folder of a step, the checkpoint itself otherwise.
        kind: how it is described: by one `.metadata`, by one `__N.metadata` of each rank, or by safetensors headers.
    """

    name: str
    step: Path
    top: Path
    kind: Kind = "metadata"

    @cached_property
    def metadata(self) -> Metadata:
        """What `.metadata` holds; mutants edit a copy of it."""
        return read_metadata(self.step)

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The entries that are tensors."""
        entries = self.metadata.state_dict_metadata.items()
        return {fqn: entry for fqn, entry in entries if isinstance(entry, TensorStorageMetadata)}

    @cached_property
    def payload(self) -> list[str]:
        """Names of the payload files that hold something."""
        return sorted({info.relative_path for info in self.metadata.storage_data.values() if info.length})

    @cached_property
    def healthy(self) -> set[str]:
        """Codes of what ckptlint says of it unharmed, all of it `info`."""
        return {item.code for item in ckptlint.check(self.step, depth="data").diagnostics}


def saves() -> list[Save]:
    """Every healthy checkpoint, and what torch consolidates from the safetensors shards among them."""
    kinds: dict[str, Kind] = {".metadata": "metadata", "__0.metadata": "ranks", "shard-00001-*": "headers"}
    found = []
    for folder in (REAL, REAL / "lookalikes", REAL / "bugs", REAL / "exports"):
        for row in manifest(folder):
            steps = ((next((folder / row["path"]).rglob(name), None), kind) for name, kind in kinds.items())
            step, kind = next(((path.parent, kind) for path, kind in steps if path is not None), (None, "metadata"))
            if row["verdict"] == "healthy" and step is not None:
                name = f"{folder.name}/{row['path']}".removeprefix("real/")
                found.append(Save(name, step, folder / row["path"].split("/")[0], kind))
    return [*found, _consolidated()]


@cache
def _consolidated() -> Save:
    folder = Path(tempfile.mkdtemp()) / "hf_consolidated"
    folder.mkdir()
    atexit.register(shutil.rmtree, folder.parent)
    keys = {key for path in (REAL / "hf_sharded").iterdir() for key in read_header(path) if key != "__metadata__"}
    files = {key: 1 + number % 2 for number, key in enumerate(sorted(keys))}
    consolidate_safetensors_files(str(REAL / "hf_sharded"), str(folder), files)
    return Save("hf_consolidated", folder, folder, "headers")


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))  # type: ignore[no-any-return]


def read_metadata(step: Path, name: str = ".metadata") -> Metadata:
    """`.metadata`, or that of one rank, as torch's own objects."""
    with megatron_names():
        return pickle.loads((step / name).read_bytes())  # type: ignore[no-any-return]


def edited(change: Callable[[Metadata, Path], object], name: str = ".metadata") -> Callable[[Path], None]:
    """An edit of the metadata, written as torch's FileSystemWriter does: `pickle.dump` of the object."""

    def edit(step: Path) -> None:
        metadata = read_metadata(step, name)
        change(metadata, step)
        with megatron_names():
            (step / name).write_bytes(pickle.dumps(metadata))

    return edit


@dataclass(frozen=True)
class Mutant:
    """One damage to one checkpoint.

    Attributes:
        about: what is damaged.
        names: keys or files of which a finding must name one; none where the checkpoint as a whole is meant.
        edit: does it to a copy, given the folder of its metadata.
        legal: why the result is a legal checkpoint: then nothing may be found.
        unseen: why nothing in the files can tell it from a healthy checkpoint that another job would have written.
        of_run: whether it damages the run around the step, which is checked then.
    """

    about: str
    names: tuple[str, ...]
    edit: Callable[[Path], None]
    legal: str = ""
    unseen: str = ""
    of_run: bool = False


@dataclass(frozen=True)
class Operator:
    """A kind of damage.

    Attributes:
        codes: the rules that may speak.
        mutants: every mutant of a checkpoint that it fits.
        kind: of the checkpoints that it damages.
    """

    name: str
    depth: Depth
    codes: frozenset[str]
    mutants: Callable[[Save], Iterator[Mutant]]
    kind: Kind = "metadata"

    def sample(self, save: Save, count: int, seed: int) -> list[Mutant]:
        """At most so many mutants of a checkpoint, always the same ones for a seed."""
        found = list(self.mutants(save)) if save.kind == self.kind else []
        return random.Random(f"{seed} {self.name} {save.name}").sample(found, min(count, len(found)))


@dataclass(frozen=True)
class Outcome:
    """What ckptlint said of a mutant.

    Attributes:
        verdict: `caught` by a warning or error of a rule that may speak (or, fail closed, an incomplete verdict),
            `noted` by an `info` alone, `missed`, and of a legal mutant `silent` or `alarm`.
        codes: the rules that caught it.
        is_named: whether one of their findings names what was damaged.
        unrelated: rules that spoke and may not, at any level, unless they speak of the healthy checkpoint too.
    """

    save: Save
    operator: Operator
    mutant: Mutant
    verdict: str
    codes: frozenset[str] = frozenset()
    is_named: bool = False
    unrelated: frozenset[str] = field(default=frozenset())


def judge(save: Save, operator: Operator, mutant: Mutant, folder: Path) -> Outcome:
    """Write the mutant below an empty folder and have it checked at the operator's depth."""
    top = Path(shutil.copytree(save.top, folder / "mutant" / save.top.name))
    step = top / save.step.relative_to(save.top)
    times = {path: path.stat().st_mtime for path in top.rglob("*") if path.is_file()}
    began = time.time() - 1
    mutant.edit(step)
    for path, moment in times.items():  # bytes rot, and a save goes wrong, without a later one; what was dated stays
        if path.exists() and path.stat().st_mtime > began:
            os.utime(path, (moment, moment))
    report = ckptlint.check(step.parent if mutant.of_run else step, depth=operator.depth)
    shutil.rmtree(folder / "mutant")
    items = list(report.diagnostics)
    loud = [item for item in items if item.severity > Severity.INFO]
    if mutant.legal:
        return Outcome(save, operator, mutant, "alarm" if loud else "silent", frozenset(item.code for item in loud))
    heard = [item for item in loud if item.code in operator.codes]
    quiet = [item for item in items if item.code in operator.codes - save.healthy]
    verdict = "caught" if heard or report.verdict == "incomplete" else "noted" if quiet else "missed"
    spoke = frozenset(item.code for item in heard or quiet)
    is_named = not mutant.names or any(name in _text(item) for item in heard for name in mutant.names)
    unrelated = frozenset(item.code for item in items) - operator.codes - save.healthy
    return Outcome(save, operator, mutant, verdict, spoke, is_named, unrelated)


def _text(item: Diagnostic) -> str:
    """All that a finding says about its place."""
    finding = item.finding
    notes = [sentence for _, sentence in item.all_notes()]
    return "\n".join([item.title, item.fqn or "", finding.at.file, finding.at.label, *finding.identity, *notes])
