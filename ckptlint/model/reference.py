"""What is said about a checkpoint beside its own metadata: by the job, by a seal, by the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.text import printable


class AxisSize(NamedTuple):
    """The size of a parallel axis and where it was read.

    Attributes:
        source: `metadata` (counted), `args`, `run_config` or `config.json` (declared), `files` (a lower bound from
            payload file names), `inferred`.
    """

    size: int
    source: str


class Declared(NamedTuple):
    """A number, text or flag that the job said about itself, and where: `args`, `run_config`, `config.json`."""

    value: int | float | str
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class ModelConfig:
    """The configuration of the model that is with a checkpoint, as it stands there.

    `values` is field -> value, as JSON has it, without what is nested deeper than any field of a model; `base` are
    those of the base model's `config.json` beside an adapter, where that is there as well.
    """

    file: str  # its path relative to the checkpoint (`config.json`)
    values: Mapping[str, Any]
    base: Mapping[str, Any] = field(default_factory=dict)
    base_layers: int = 0  # that the base model declares; 0 where it does not

    def sections(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The configuration and each of its sections, at any depth, under a name for reports."""
        sections: list[tuple[str, Mapping[str, Any]]] = [(self.file, self.values)]
        while sections:
            place, values = sections.pop()
            yield place, values
            inner = [(name, section) for name, section in values.items() if isinstance(section, dict)]
            sections += [(f"{printable(name)} in {place}", section) for name, section in reversed(inner)]


@dataclass(frozen=True, slots=True)
class SealEntry:
    """What a tensor held when the checkpoint was sealed."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor, in elements
    digest: int  # of all its elements (`digests.elem_digest`), whatever the sharding


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What `ckptlint.seal.json` says of the contents, as the saving job had them.

    Attributes:
        algorithm: of the digests; the entries of an unknown one are not read.
        metadata: BLAKE2b of the `.metadata` that it belongs to, 32 hexadecimal digits; "" for none.
        entries: key, printable -> what its tensor held.
        skipped: key, printable -> why it was not sealed.
        step: of the job, None where it did not say.
        version: of the ckptlint that wrote it.
    """

    algorithm: str
    metadata: str
    entries: dict[str, SealEntry]
    skipped: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    version: str = ""


ReferenceKind = Literal["manifest", "safetensors", "index", "Hugging Face folder", "checkpoint"]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What a checkpoint is expected to hold (`--expect`).

    Attributes:
        source: the path as the user gave it, printable.
        kind: what is there.
        tensors: name, printable -> dtype and global shape, each None where the reference does not say; empty when only
            a config.json is at hand.
        declared: what its config.json says about the model, by canonical name (`config_fields.read_declared`).
        parts: the components of a checkpoint (`model`, `optim`) by folder name; empty when it is one folder.
        not_looked_at: what it does not tell although a config.json is at hand, and why, as a sentence.
        values: name, printable -> dtype -> digest of the elements in it (`seals.row_hashes.digest`).
        rows: name, printable -> dtype -> uint64 [rows], the words of the rows in it, where the reference has them.
        salt: with which these words and digests were made.
    """

    source: str
    kind: ReferenceKind
    tensors: dict[str, tuple[str | None, tuple[int, ...] | None]]
    declared: dict[str, Declared] = field(default_factory=dict)
    parts: dict[str, Reference] = field(default_factory=dict)
    not_looked_at: str = ""
    values: dict[str, dict[str, int]] = field(default_factory=dict)
    rows: dict[str, dict[str, npt.NDArray[np.uint64]]] = field(default_factory=dict)
    salt: int = 0

    def part(self, name: str) -> Reference:
        """The component to compare with a folder of this name, or the whole."""
        return self.parts.get(name, self)
