"""`ckptlint live PATH`: the ranks of a job compare what they see under a path, and share the reading of the payload."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Timer
from typing import Any

import numpy as np

from ckptlint.depth import Depth
from ckptlint.errors import AccessError, CkptlintError, ConfigError, NothingToCheckError
from ckptlint.grouping import grouped
from ckptlint.live.compare.group import GroupBroken, RankGroup, Solo, new_torch_group
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import human_bytes, human_duration, named_ranks, plural, printable, verb
from ckptlint.model.tiling import IntArray
from ckptlint.payload.integrity import INTEGRITY
from ckptlint.payload.parts import PartialRead, join
from ckptlint.payload.reader import Reader
from ckptlint.payload.reading import ReadOptions
from ckptlint.sandbox import one_budget
from ckptlint.seals.file import SEAL
from ckptlint.storage.folder import Folder
from ckptlint.storage.local import LocalFolder

_HASHED = (".metadata", "common.pt", "metadata.json", INTEGRITY, SEAL)
_PATIENCE = 120.0  # seconds; beyond it a rank counts as lost
_SLOWEST = 2 * 1024**2  # bytes a second; a rank that reads slower counts as lost
_PAUSE = 1.0
_SILENT = 5.0  # seconds of waiting for other ranks before it is said
_SHOWN = 8
_BLOCK = 8 * 1024**2


@dataclass(slots=True)
class SharedCheck:
    """The processes that check together.

    Attributes:
        group: of all ranks.
        node, nodes: position of this rank among those of its node, and how many these are.
        every_node: whether each node reads all of the payload.
        settle: seconds to wait for all ranks to see the same.
        seed: of a sample; the same on all ranks.
        said: on rank 0, how many ranks saw the same files and what each read, as a sentence; "" for one rank alone.
    """

    group: RankGroup
    seed: int
    node: int = 0
    nodes: int = 1
    every_node: bool = False
    settle: float = 0.0
    said: str = ""
    _waits: bool = field(default=False)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def threads(self) -> int:
        """Threads for reading: the processors of the node shared out over its ranks."""
        return max(1, min(8, (os.cpu_count() or 1) // self.nodes))

    def send_exit_code(self, code: int) -> None:
        """Give the exit code to the ranks that wait for it in `source`."""
        if self._waits and self.rank == 0 and self.group.world > 1:
            self.group.begin(_PATIENCE)
            self.group.broadcast(np.array([code], np.int64), 0)

    def source(
        self, path: str, all_steps: bool, depth: Depth, reading: ReadOptions | None
    ) -> Iterator[tuple[CheckpointPlace, Checkpoint]]:
        """As `lint.run.opened`, on rank 0; the other ranks take part, wait for the end, and leave with its exit code.

        All raise AccessError where a rank could not read its part, or did not come in time.
        """
        self._waits = True
        try:
            yield from self._checkpoints(path, all_steps, depth, reading)
        except GroupBroken as error:
            self._waits = False
            text = f"a rank was lost: {error}"
            raise (CkptlintError(text) if self.rank else AccessError(text)) from None  # rank 0 alone reports
        finally:
            if self._waits and self.rank:
                self.group.begin(_PATIENCE * 5)  # rank 0 runs the rules and writes the reports
                code = 4
                with suppress(GroupBroken):
                    code = int(self.group.broadcast(np.zeros(1, np.int64), 0)[0])
                sys.exit(code)

    def _checkpoints(
        self, path: str, all_steps: bool, depth: Depth, reading: ReadOptions | None
    ) -> Iterator[tuple[CheckpointPlace, Checkpoint]]:
        """Rank 0 reads each checkpoint, and all ranks compare what they see of its files."""
        view = self._settled(path, all_steps)
        if view.problems:
            # each sees something else: the reading cannot be shared
            if self.rank == 0:
                if not view.places:
                    raise AccessError(f"other ranks see a checkpoint, rank 0 does not: {view.reason}")
                for place in view.places:
                    ckpt = open_checkpoint(place, depth.looks_at_files)
                    yield place, replace(ckpt, problems=[*ckpt.problems, *view.problems])
            return
        if view.reason:
            raise NothingToCheckError(view.reason)
        shared, hosts = 0, {*self._texts(socket.gethostname().encode())}
        for place in view.places:
            reader, share, reason = self._read(place, depth, reading)
            self._agree(reason, share is not None, 0 if reader is None else int(reader.ckpt.records.byte_length.sum()))
            assert reader is not None
            if share is None:
                ckpt = reader.ckpt
            else:
                gathered = self._gathered(share)
                if self.rank:
                    continue
                ckpt = join(place.folder, reader.ckpt, reader.how, gathered)
                ckpt = replace(ckpt, problems=[*ckpt.problems, *_conflicts(ckpt, gathered)])
                shared += ckpt.total_bytes if reader.how.depth.reads_all and reader.how.percent is None else 0
            if self.rank == 0:
                yield place, ckpt
        if self.group.world > 1:
            ranks = f"{self.group.world:,} ranks on {plural(len(hosts), 'node')}"
            of_each = f"; each read {human_bytes(shared // (self.nodes if self.every_node else self.group.world))}"
            self.said = f"{ranks} see the same {plural(len(view.sizes), 'file')}{of_each if shared else ''}"

    @one_budget()
    def _read(
        self, place: CheckpointPlace, depth: Depth, reading: ReadOptions | None
    ) -> tuple[Reader | None, PartialRead | None, str]:
        """This rank's part of a checkpoint; and why it has none, when it failed."""
        try:
            ckpt, folder = open_checkpoint(place, depth.looks_at_files), place.folder
            number, count = (self.node, self.nodes) if self.every_node else (self.rank, self.group.world)
            share = shares(ckpt, count, by_file=not ckpt.locates_bytes or folder.has(INTEGRITY))[number]
            how = reading or ReadOptions(Depth.HEADERS, 1)
            reader = Reader(folder, ckpt, how, share, self.rank == 0)
            if reading is None or not ckpt.readable:
                return reader, None, ""
            if self.every_node:
                _forget_pages(folder, ckpt, share)
            return reader, reader.part(), ""
        except CkptlintError as error:
            return None, None, str(error) or type(error).__name__

    # ------------------------------------------------------------ what the ranks see

    def _settled(self, path: str, all_steps: bool) -> View:
        """What this rank sees, once all see the same or time is up; with problems when they do not."""
        until = time.monotonic() + self.settle
        while True:
            view = look(path, all_steps)
            names = ("path", *_HASHED, "the listing")
            words = np.array([view.hashes[name] for name in names], np.int64)
            self.group.begin(_PATIENCE)
            reduced = self.group.reduce(np.concatenate([words, -words, [time.monotonic() >= until]]), "max")
            count = len(names)
            odd = np.flatnonzero(reduced[:count] != -reduced[count : 2 * count]).tolist()
            if not odd:
                return view
            if reduced[-1]:
                return replace(view, problems=self._differences(view, [names[i] for i in odd]))
            time.sleep(_PAUSE)

    def _differences(self, view: View, names: Sequence[str]) -> tuple[Problem, ...]:
        """A problem for each thing that ranks see differently, with a line for each kind of view."""
        files = json.loads(self._texts(json.dumps(view.sizes).encode() if self.rank == 0 else b"")[0])
        sizes = {name: size for name, size in view.sizes.items() if files.get(name, -1) != size}
        sizes |= dict.fromkeys(files.keys() - view.sizes.keys(), -1)
        seen = {name: [view.hashes[name], view.reason] for name in names}
        odd = dict(sorted(sizes.items())[:_SHOWN])
        texts = self._texts(json.dumps([socket.gethostname(), seen, odd, len(sizes)]).encode())
        answers = [json.loads(text) for text in texts]
        hosts = [answer[0] for answer in answers]
        problems = []
        for name in names:
            views: list[tuple[str, int]] = []
            for rank, (_, hashes, differing, count) in enumerate(answers):
                number, sentence = hashes[name]
                hashed = f"hash {number:014x}" if number >= 0 else "absent"
                views.append(
                    (sentence or (_listed(differing, count, files) if name == "the listing" else hashed), rank)
                )
            by_view = grouped(views)
            on = {text: ", ".join(dict.fromkeys(hosts[rank] for rank in ranks)) for text, ranks in by_view.items()}
            detail = tuple(f"{named_ranks(ranks)} ({on[text]}): {text}" for text, ranks in by_view.items())
            what = {"path": "a different checkpoint", "the listing": "different files"}.get(name, f"a different {name}")
            others = [rank for text, ranks in list(by_view.items())[1:] for rank in ranks] or [0]
            sentence = f"{named_ranks(others)} {verb(len(others), 'sees')} {what} from rank 0"
            problems.append(Problem("view", name, printable(sentence), detail=detail, hint=_HINT))
        return tuple(problems)

    # ------------------------------------------------------------ words between ranks

    def _agree(self, reason: str, has_part: bool, size: int) -> None:
        """Meet the other ranks after reading; if any failed, all raise AccessError with the sentence of the lowest."""
        self.group.begin(_PATIENCE + size / _SLOWEST)
        words = [self.group.world - self.rank if reason else 0, has_part, not has_part]
        failed, some, others = self.group.reduce(np.array(words, np.int64), "max").tolist()
        if failed:
            first = self.group.world - failed
            text = printable(self._texts(reason.encode("utf-8", "backslashreplace"))[first].decode("utf-8", "replace"))
            raise AccessError(text if self.group.world == 1 else f"rank {first}: {text}")
        if some and others:
            raise AccessError("only some ranks could read the metadata")

    def _gathered(self, share: PartialRead) -> list[PartialRead]:
        """The parts of all ranks, on rank 0: they come from processes of this job alone."""
        if self.group.world == 1:
            return [share]
        texts = self._texts(pickle.dumps(share))
        return [] if self.rank else [pickle.loads(text) for text in texts]  # noqa: S301

    def _texts(self, text: bytes) -> list[bytes]:
        """The bytes of every rank."""
        self.group.begin(_PATIENCE)
        length = int(self.group.reduce(np.array([len(text)], np.int64), "max")[0])
        data = text.ljust(-(-length // 8) * 8, b"\0")
        words = np.concatenate([np.array([len(text)], np.int64), np.frombuffer(data, np.int64)])
        return [row[1:].tobytes()[: int(row[0])] for row in self.group.gather(words)]


_HINT = "compare the mounts and the clocks of these hosts; --settle 60 waits for a slow network file system"
_PLACE = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def _environment() -> list[int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of torchrun; raises ConfigError for those of no job."""
    numbers = list[int]()
    for place, count in _PLACE:
        texts = [os.environ.get(place, "0"), os.environ.get(count, "1")]
        for name, text in zip((place, count), texts, strict=True):
            if not text.isdecimal():
                raise ConfigError(f"{name} is {printable(text)!r}, not a number: let torchrun set it")
        number, world = map(int, texts)
        if number >= world and count in os.environ:
            raise ConfigError(f"{place} is {number}, but {count} is {world}: the last one is {world - 1}")
        numbers += [number, world]
    lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if numbers[1] > 1 and lacking:
        raise ConfigError(f"WORLD_SIZE is {numbers[1]}, and {lacking[0]} is not set: let torchrun start the ranks")
    if numbers[1] > 1 and not os.environ["MASTER_PORT"].isdecimal():
        raise ConfigError(f"MASTER_PORT is {printable(os.environ['MASTER_PORT'])!r}, not a number")
    return numbers


@contextmanager
def joined(every_node: bool, settle: float, waiting: Callable[[str], None]) -> Iterator[SharedCheck]:
    """The job that torchrun started, or a job of this one process; torch is imported for the former alone.

    `waiting` is called with a sentence once this rank has waited a while for the others. Raises AccessError where they
    do not come, ConfigError where the environment is that of no job.
    """
    rank, world, node, nodes = _environment()
    if world == 1:
        yield SharedCheck(Solo(), secrets.randbelow(2**31), every_node=every_node, settle=settle)
        return
    try:
        import torch.distributed as dist
    except ImportError:
        raise AccessError(
            "several ranks need torch to talk to each other, and it is not installed; without a GPU: "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        ) from None
    others = f"the other {plural(world - 1, 'rank') if world > 2 else 'rank'}"
    others = f"rank 0 of {world:,}" if rank else others
    place = printable(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    sentence = f"rank {rank:,} waits for {others} at {place}, for at most {human_duration(_PATIENCE)}"
    timer = Timer(_SILENT, waiting, [sentence])
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_PATIENCE))
        group = new_torch_group("gloo", _PATIENCE)
        seed = int(group.broadcast(np.array([secrets.randbelow(2**31)]), 0)[0])
    except (RuntimeError, ValueError, GroupBroken) as error:
        raise AccessError(f"the ranks did not find each other: {printable(str(error))}") from None
    finally:
        timer.cancel()
    try:
        yield SharedCheck(group, seed, node, nodes, every_node, settle)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class View:
    """What one rank sees under the path.

    Attributes:
        places: of the checkpoints.
        reason: why there are none, "" when there are.
        hashes: name -> 56 bits of what is seen, -1 for nothing: the path, the metadata files, the listing.
        sizes: file -> bytes; names of all folders together.
        problems: in what the ranks differ.
    """

    places: list[CheckpointPlace]
    reason: str
    hashes: dict[str, int]
    sizes: dict[str, int]
    problems: tuple[Problem, ...] = ()


def look(path: str, all_steps: bool) -> View:
    """What this process sees now."""
    hashes = dict.fromkeys(("path", *_HASHED, "the listing"), -1)
    sizes: dict[str, int] = {}
    try:
        places = find(path, all_steps)
        folders = [unit.folder for unit in places]
        for folder in folders:
            above = f"{folder.name}/" if len(folders) > 1 else ""
            sizes |= {above + name: folder.size(name) for name in folder.files()}
        for name in _HASHED:
            digests = [_digest(folder, name) for folder in folders if folder.has(name)]
            hashes[name] = _short(repr(digests).encode()) if digests else -1
    except CkptlintError as error:
        return View([], str(error), hashes, {})
    hashes["path"] = _short("\n".join(folder.display for folder in folders).encode())
    hashes["the listing"] = _short(json.dumps(sorted(sizes.items())).encode("utf-8", "backslashreplace"))
    return View(places, "", hashes, sizes)


def _digest(folder: Folder, name: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for block in folder.blocks(name, _BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def _listed(differing: Mapping[str, int], count: int, files: Mapping[str, int]) -> str:
    """The files that a rank sees otherwise than rank 0."""
    if not count:
        return f"{len(files):,} files"
    texts = [
        f"{printable(name)} {'is absent' if size < 0 else f'has {size:,} bytes'}"
        + (f", {files[name]:,} on rank 0" if name in files and size >= 0 else "")
        for name, size in differing.items()
    ]
    return "; ".join(texts) + (f"; {count - len(texts):,} more" if count > len(texts) else "")


# ---------------------------------------------------------------- sharing out


def shares(ckpt: Checkpoint, count: int, by_file: bool) -> list[IntArray]:
    """The rows of `Checkpoint.records` for each of so many readers: runs of neighbours or files of about equal size."""
    records = ckpt.records
    order = np.lexsort((records.byte_offset, records.file))
    size = np.maximum(records.byte_length[order], 1).astype(float)
    # the place of the record, or of its file, among those that are shared out
    unit = records.file[order] if by_file else np.arange(len(order))
    if by_file:
        size = np.bincount(unit, weights=size, minlength=len(ckpt.files))
    end = np.cumsum(size)
    middle, total = (end - size / 2)[unit], float(end[-1]) if len(end) else 0.0
    reader = np.minimum((middle / total * count).astype(np.int64), count - 1) if total else np.zeros(0, np.int64)
    return [np.sort(order[reader == number]) for number in range(count)]


def _forget_pages(folder: Folder, ckpt: Checkpoint, share: IntArray) -> None:
    """Have the kernel drop what it holds of the files, so that the store is read and not this node's memory."""
    if not isinstance(folder, LocalFolder) or not hasattr(os, "posix_fadvise"):
        return
    for number in sorted(set(ckpt.records.file[share].tolist())):
        if (path := ckpt.files[number].path) is not None:
            with suppress(OSError), (folder.path / path).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _conflicts(ckpt: Checkpoint, gathered: Sequence[PartialRead]) -> list[Problem]:
    """Records that two nodes read, and of which they did not read the same."""
    first: dict[int, tuple[Any, ...]] = {}
    rows: dict[int, set[int]] = {}
    for rank, share in enumerate(gathered if len(gathered) > 1 else ()):
        for row, *what in zip(share.rows.tolist(), share.sums.tolist(), share.table.state.tolist(), strict=True):
            if first.setdefault(row, tuple(what)) != tuple(what):
                rows.setdefault(row, set()).add(rank)
    if not rows:
        return []
    ranks = named_ranks(set().union(*rows.values()))
    row = min(rows)
    file, start, length = ckpt.byte_range_of(row)
    detail = (f"the first is {ckpt.records.name(row)} in {file}, bytes {start:,}-{start + length:,}",)
    sentence = f"in {plural(len(rows), 'record')} {ranks} read different bytes from the first node"
    return [Problem("view", file, sentence, detail=detail, hint=_HINT)]
