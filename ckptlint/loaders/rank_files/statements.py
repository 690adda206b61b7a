"""Collects statements of rank files while a loader reads them; `analysis.ranks.rank_sets` judges them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ckptlint.formats.torch_file import TorchFile
from ckptlint.model import Misfit, RankFile, RankFileSet, Statement
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable

Thing = TypeVar("Thing")


def itself(thing: Any) -> Any:
    """The value itself: the default way to compare two statements."""
    return thing


@dataclass(slots=True)
class Statements:
    """Collects statements that rank files should share, where they differ."""

    noted: list[Statement] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    others: dict[str, tuple[str, str, bool]] = field(default_factory=dict)

    def note_if_different(
        self,
        what: str,
        things: Sequence[tuple[Thing, str]],
        fqn: str = "",
        by: Callable[[Thing], Hashable] = itself,
        text: Callable[[Thing], str] = str,
        among: str = "",
    ) -> bool:
        """Whether all files state the same of a thing that they share; what they state is noted where they differ.

        A thing is what is stated and the file's name. `by` is what is compared of it, `text` how it is shown, `fqn` the
        raw key concerned; `among` says what these files share, where others are compared by themselves.
        """
        if not things or all(by(thing) == by(things[0][0]) for thing, _ in things[1:]):
            return True
        shown: dict[Hashable, str] = {}
        for thing, file in things:
            value = by(thing)
            if value not in shown:
                shown[value] = text(thing)
            self.noted.append(Statement(what, shown[value], file, among, printable(fqn)))
        return False

    def copies(self, what: str, groups: Iterable[Iterable[tuple[int, str]]], fqn: str) -> None:
        """Note the checksums (0: none) and files of copies of a tensor where they differ inside a group."""
        known = [[item for item in group if item[0]] for group in groups]
        things = [item for group in known if len({crc for crc, _ in group}) > 1 for item in group]
        self.note_if_different(what, things, fqn, text=lambda crc: f"CRC-32 {crc:08x}")

    def other_name(self, file: str, inside: str, same_as: str = "", is_stated: bool = False) -> None:
        """Note that a file was saved under another name; the arguments are attributes of `RankFile`."""
        self.others[file] = inside, same_as, is_stated

    def elsewhere(self) -> set[str]:
        """The files that hold what surely belongs under another name: their parts have no place."""
        return {file for file, (_, same_as, is_stated) in self.others.items() if same_as or is_stated}

    def of(self, files: Iterable[RankFile], expected: Mapping[str, Sequence[RankFile]]) -> RankFileSet:
        """The set, with all that was noted; `expected` says from where the grid is -> its files."""
        named = []
        for file in files:
            inside, same_as, is_stated = self.others.get(file.name, ("", "", False))
            named.append(replace(file, inside=inside, same_as=same_as, is_stated=is_stated))
        grid = {source: tuple(values) for source, values in expected.items()}
        return RankFileSet(tuple(named), grid, tuple(self.noted), tuple(self.misfits))


def checksum(tensor: StoredTensor, file: TorchFile) -> int:
    """CRC-32 of a tensor that fills its storage; 0 where there is none, or it holds more."""
    place = file.storages.get(tensor.key)
    return place.crc if place is not None and tensor.extent == tensor.length else 0


def checksums(file: TorchFile, keys: Collection[str] | None = None) -> tuple[tuple[int, int], ...]:
    """(size, CRC-32) of these storages of a file (or of all) that hold bytes; () where one has no checksum."""
    places = file.storages.values() if keys is None else [place for key in keys if (place := file.storages.get(key))]
    sums = tuple((place.size, place.crc) for place in places if place.size)
    return sums if all(crc for _, crc in sums) else ()
