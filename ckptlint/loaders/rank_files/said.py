"""What the files of a set say, gathered by their loader as it reads them; `analysis.rank_sets` judges it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptlint.formats.torch_file import TorchFile
from ckptlint.model import Misfit, OtherName, RankFile, RankFileSet, Said
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable

Thing = TypeVar("Thing")


def itself(thing: Any) -> Any:
    """The value of a thing that is one."""
    return thing


@dataclass(slots=True)
class Sayings:
    """What files say of what they share; that which all say alike is not kept."""

    said: list[Said] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    other_names: list[OtherName] = field(default_factory=list)

    def alike(
        self,
        what: str,
        things: Sequence[tuple[Thing, str]],
        fqn: str = "",
        by: Callable[[Thing], Hashable] = itself,
        text: Callable[[Thing], str] = str,
    ) -> bool:
        """Note what files say of a thing that they share; whether all say the same.

        Args:
            what: the thing, as a noun.
            things: (what is said, name of the file).
            fqn: the key concerned, raw.
            by: what is compared of it.
            text: how it is shown.
        """
        if not things or all(by(thing) == by(things[0][0]) for thing, _ in things[1:]):
            return True
        groups: dict[Hashable, tuple[str, list[str]]] = {}
        for thing, file in things:
            value = by(thing)
            if value not in groups:
                groups[value] = text(thing), []
            groups[value][1].append(file)
        self.said.append(Said(what, tuple((shown, tuple(files)) for shown, files in groups.values()), printable(fqn)))
        return False

    def copies(self, what: str, groups: Iterable[Iterable[tuple[int, str]]], fqn: str) -> None:
        """Note the checksums of copies of a tensor where they differ inside a group.

        Args:
            groups: (CRC-32, name of the file) of the copies of one part each; 0 where there is none.
        """
        known = [[item for item in group if item[0]] for group in groups]
        things = [item for group in known if len({crc for crc, _ in group}) > 1 for item in group]
        self.alike(what, things, fqn, text=lambda crc: f"CRC-32 {crc:08x}")

    def elsewhere(self) -> set[str]:
        """The files that hold what belongs under another name: their parts have no place."""
        return {other.file for other in self.other_names if other.is_stated or other.same_as}

    def of(self, files: Iterable[RankFile], expected: Iterable[RankFile], grid: str) -> RankFileSet:
        """The set with all that was said."""
        return RankFileSet(
            tuple(files), tuple(expected), grid, tuple(self.said), tuple(self.misfits), tuple(self.other_names)
        )


def checksum(tensor: StoredTensor, found: TorchFile) -> int:
    """CRC-32 of a tensor that fills its storage; 0 where there is none, or more lies there."""
    place = found.storages.get(tensor.key)
    return place.crc if place is not None and tensor.extent == tensor.length else 0


def checksums(found: TorchFile, keys: Collection[str] | None = None) -> tuple[tuple[int, int], ...]:
    """(size, CRC-32) of the storages of a file that hold bytes; () where one has no checksum.

    Args:
        keys: the storages, all without.
    """
    places = found.storages.values() if keys is None else [place for key in keys if (place := found.storages.get(key))]
    sums = tuple((place.size, place.crc) for place in places if place.size)
    return sums if all(crc for _, crc in sums) else ()
