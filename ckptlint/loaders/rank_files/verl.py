"""verl's checkpoints and those of its family: for each rank a file of the model, the optimizer and other state.

A model file is a dict of DTensors (FSDP2, FSDP1 with a mesh) or ShardedTensors (FSDP1 without), and of plain tensors
that every rank holds whole. From mesh, placements and the rank in the name follows what a file must hold of a tensor.

Source:
    verl 0.9.1 verl/utils/checkpoint/fsdp_checkpoint_manager.py; SkyRL, oumi and lmms-engine write the same names
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ckptlint.errors import LimitError
from ckptlint.formats.torch_file import TorchFile, number_in, ranges_of
from ckptlint.loaders.common_state import read_configs
from ckptlint.loaders.rank_files.onto import Columns, Part, damaged, read_file
from ckptlint.loaders.rank_files.sets import FileSet, file_sets, verl_name
from ckptlint.loaders.run_folder import read_run
from ckptlint.loaders.step_files import optimizer_file
from ckptlint.model import (
    Checkpoint,
    Disagreement,
    FileState,
    FileTable,
    Misfit,
    OtherName,
    Problem,
    RankFile,
    RankFileSet,
    StepFile,
    StoredFile,
    empty_objects,
)
from ckptlint.model.stored import Mesh, Placement, Stored, StoredDTensor, StoredShards, StoredTensor
from ckptlint.model.text import plural, printable, ranges, shape_text
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.keys import is_adapter, parse
from ckptlint.vocabulary.mesh import read_topology
from ckptlint.vocabulary.placements import box, runs

_CONFIG = "fsdp_config.json"
_CONFIG_LIMIT = 65536
_RANKS_LIMIT = 2**16
_KINDS = {"model": "model", "optim": "optimizer", "extra_state": "random state"}
_SAME_SHAPES = 0.9  # of an optimizer's states and the parameters that they are taken for

Shape = tuple[int, ...]


def read_verl(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The set of rank files in a folder.

    Raises:
        AccessError: the operating system refused a read.
        LimitError: the names count more ranks than any job has.
    """
    sets = [own for own in file_sets(folder) if own.kind == "verl"]
    own = _chosen(folder, sets)
    problems: list[Problem] = []
    world = verl_name(own.files[0])[1]
    if world > _RANKS_LIMIT:
        raise LimitError(f"counts {world:,} ranks in its name, the limit is {_RANKS_LIMIT:,}")
    files = {verl_name(name)[::2]: name for name in own.files}
    kinds = [kind for kind in _KINDS if any(found == kind for found, _ in files)]
    reading = _Reading(folder, world)
    stored: list[StoredFile] = []
    told: list[RankFile] = []
    for kind in kinds:
        for rank in range(world):
            name = files.get((kind, rank))
            if name is None:
                continue
            state, size = folder.look_at(name)
            shown: FileState = state if look_at_files else "unchecked"
            label = printable(name)
            stored.append(StoredFile(label, name, size if look_at_files else None, shown, True))
            found = read_file(folder, name, problems) if state in READABLE else None
            if found is not None and not isinstance(found.root, dict):
                problems.append(damaged(label, f"{label} holds no dict"))
                found = None
            told.append(RankFile(label, _KINDS[kind], {"rank": rank}, found is not None))
            if found is not None:
                reading.files[kind, rank] = _File(label, len(stored) - 1, found)
    lost = tuple(
        RankFile(f"{kind}_world_size_{world}_rank_{rank}.pt", _KINDS[kind], {"rank": rank})
        for kind in kinds
        for rank in range(world)
        if (kind, rank) not in files
    )
    reading.judge()
    tensors, records, storages = reading.columns.made()
    problems += _leftovers(sets, own) + _beyond(folder)
    if (said := _said_world(folder)) not in (None, world):
        reading.disagree("world size", {str(world): [file.name for file in told], str(said): [_CONFIG]})
    declared, config, config_problems = read_configs(folder, None)
    unread = [file for file in told if not file.is_read and file.kind != "random state"]
    gone = [file for file in lost if file.kind != "random state"]
    doubtful = len(unread) + len(gone) + len(reading.left_out)
    partial = f"{doubtful} of {len(told) + len(lost)} rank files are missing or unusable" if doubtful else ""
    if reading.unplaced and not doubtful:
        partial = f"the rank files contradict each other on {plural(len(reading.unplaced), 'key')}"
    readable = any(kind != "extra_state" for kind, _ in reading.files)
    label = f"{own.files[0]} .. {own.files[-1]}" if len(own.files) > 1 else own.files[0]
    return Checkpoint(
        path=folder.display,
        format="verl",
        tensors=tensors,
        records=records,
        storages=storages,
        files=FileTable.of(stored),
        declared=declared,
        config=config,
        run=read_run(folder),
        topology=read_topology(declared, empty_objects(), None, range(world)),
        step_files=reading.beside,
        problems=problems + config_problems,
        readable=readable,
        partial=partial,
        metadata_file=printable(label),
        rank_files=RankFileSet(
            tuple(told),
            lost,
            f"the world size {world} in the names of the files",
            tuple(reading.disagreements),
            tuple(reading.misfits),
            tuple(reading.other_names),
        ),
    )


def _chosen(folder: Folder, sets: list[FileSet]) -> FileSet:
    """The set of the world size that `fsdp_config.json` names; else the one with the largest share of its files."""
    said = _said_world(folder)

    def rank(own: FileSet) -> tuple[bool, float, int]:
        world = verl_name(own.files[0])[1]
        models = sum(name.startswith("model_") for name in own.files)
        return world == said, models / world, world

    return max(sets, key=rank)


def _said_world(folder: Folder) -> int | None:
    if not folder.has(_CONFIG):
        return None
    try:
        document = json.loads(folder.read_range(_CONFIG, 0, _CONFIG_LIMIT))
    except (ValueError, RecursionError):
        return None
    said = document.get("world_size") if isinstance(document, dict) else None
    return said if type(said) is int and 0 < said < 2**31 else None


def _leftovers(sets: list[FileSet], own: FileSet) -> list[Problem]:
    world = verl_name(own.files[0])[1]
    return [
        Problem(
            "note",
            printable(other.files[0]),
            f"ckptlint did not read {plural(len(other.files), 'file')} of world size {verl_name(other.files[0])[1]} "
            f"beside those of world size {world}",
            why="they are probably left from another save into this folder",
        )
        for other in sets
        if other is not own
    ]


def _beyond(folder: Folder) -> list[Problem]:
    """Files of ranks that the world in their own name does not have."""
    named = ((printable(name), *verl_name(name)[1:]) for name in folder.files_beside() if verl_name(name)[0])
    return [
        Problem(
            "unreadable",
            label,
            f"{label} is named for rank {rank:,} of {world:,}, and there is none",
            why="no load asks for it, so what it holds belongs to another file or to none",
            hint="compare it with the files of the node that wrote it",
            beside=True,
        )
        for label, world, rank in named
        if rank >= world
    ]


# ---------------------------------------------------------------- the files of all ranks


@dataclass(slots=True)
class _File:
    """A file that was read: its name, its number among the files, and what it holds."""

    label: str
    number: int
    found: TorchFile


@dataclass(slots=True)
class _Held:
    """What one rank's file holds under a key."""

    rank: int
    value: Stored


@dataclass(slots=True)
class _Reading:
    """What the files of all ranks say, held against each other."""

    folder: Folder
    world: int
    files: dict[tuple[str, int], _File] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)
    disagreements: list[Disagreement] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    other_names: list[OtherName] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    unplaced: list[str] = field(default_factory=list)
    beside: tuple[StepFile, ...] = ()

    def judge(self) -> None:
        """Fill everything but `files`."""
        self._worlds()
        self._names()
        model = self._of("model")
        self._keys({rank: file.found.root for rank, file in model.items()}, model)
        self._optimizer()
        self._schedulers()

    def disagree(
        self, what: str, says: Mapping[str, Iterable[str]], fqns: Iterable[str] = (), is_sure: bool = True
    ) -> None:
        """Note what files say differently; who says what, the most files first."""
        groups = sorted(((value, tuple(files)) for value, files in says.items()), key=lambda item: -len(item[1]))
        self.disagreements.append(Disagreement(what, tuple(groups), tuple(map(printable, fqns)), is_sure))

    def _of(self, kind: str) -> dict[int, _File]:
        """Rank -> its file of a kind, without those that belong elsewhere."""
        return {
            rank: file for (own, rank), file in self.files.items() if own == kind and file.label not in self.left_out
        }

    # ------------------------------------------------------------ whole files

    def _names(self) -> None:
        """Files whose content says that another rank wrote them."""
        crcs = {key: _checksums(file.found) for key, file in self.files.items()}
        for (kind, rank), file in self.files.items():
            if file.label in self.left_out:
                continue
            writer = next((said for value in _values(file.found.root) if (said := _writer(value)) >= 0), -1)
            named = verl_name(f"{file.found.prefix}.pt")
            by = writer if writer >= 0 else named[2] if named[:2] == (kind, self.world) else -1
            if by not in (-1, rank):
                inside = f"rank {by}"
            elif named[0] == kind and named[1:] != (self.world, rank):
                inside = f"rank {named[2]} of {named[1]}"
            else:
                continue
            other = self.files.get((kind, by)) if by != rank else None
            is_same = other is not None and crcs[kind, rank] and crcs[kind, by] == crcs[kind, rank]
            same = other.label if other is not None and is_same else ""
            self.other_names.append(OtherName(file.label, inside, same, writer not in (-1, rank)))
            if writer not in (-1, rank) or same:
                self.left_out.add(file.label)

    def _worlds(self) -> None:
        """Files whose mesh spans another world than their names say."""
        sizes: dict[int, list[str]] = defaultdict(list)
        for file in self.files.values():
            world = next((size for value in _values(file.found.root) if (size := _world(value)) > 0), 0)
            if world:
                sizes[world].append(file.label)
        if set(sizes) <= {self.world}:
            return
        says = {f"a mesh of {plural(size, 'rank')}": files for size, files in sizes.items()}
        if self.world not in sizes:
            says[f"{plural(self.world, 'rank')} in the names"] = [file.label for file in self.files.values()][:1]
        self.disagree("world size", says)
        self.left_out.update(label for size, files in sizes.items() if size != self.world for label in files)

    def _schedulers(self) -> None:
        """The step that the scheduler of each rank counted."""
        says: dict[str, list[str]] = defaultdict(list)
        for file in self._of("extra_state").values():
            scheduler = file.found.root.get("lr_scheduler")
            step = scheduler.get("last_epoch") if isinstance(scheduler, dict) else None
            if type(step) is int:
                says[f"{step:,}"].append(file.label)
        if len(says) > 1:
            self.disagree("step", says)

    # ------------------------------------------------------------ keys

    def _tensors(self, roots: Mapping[int, Mapping[Any, Any]]) -> dict[str, list[_Held]]:
        """Key -> what each rank holds of it, in the order of the ranks."""
        held: dict[str, list[_Held]] = {}
        for rank, root in roots.items():
            for key, value in root.items():
                if isinstance(key, str) and isinstance(value, (StoredTensor, StoredDTensor, StoredShards)):
                    held.setdefault(key, []).append(_Held(rank, value))
        return held

    def _keys(
        self, roots: Mapping[int, Mapping[Any, Any]], files: Mapping[int, _File], are_slices: bool = False
    ) -> None:
        """Hold the ranks' parts of each key against each other, and place them.

        Args:
            are_slices: whether plain tensors are slices of a flat one, not copies.
        """
        split: dict[tuple[str, str, tuple[int, ...]], list[str]] = defaultdict(list)
        for fqn, held in self._tensors(roots).items():
            known = {rank.rank for rank in held}
            places: list[Shape | None] = [None] * len(held)
            if isinstance(held[0].value, StoredTensor) and not are_slices:
                places[0] = (0,) * len(held[0].value.shape)
            differs = self._differs(held)
            if differs is not None:
                split[differs].append(fqn)
            elif lacking := self._lacking(held, known, files):
                split["key", "", lacking].append(fqn)
            elif isinstance(held[0].value, StoredDTensor):
                places = self._placed(fqn, held, files)
            elif isinstance(held[0].value, StoredShards):
                self._add_shards(fqn, held, files)
                continue
            elif are_slices:
                self._add_slices(fqn, held, files)
                continue
            else:
                self._compare(fqn, [held], files, "content")
            if places == [None] * len(held):
                self.unplaced.append(fqn)
            self._add(fqn, held, places, files)
        for (what, _, ranks), fqns in split.items():
            labels = [files[rank].label for rank in ranks]
            others = [file.label for rank, file in files.items() if rank not in ranks]
            if what == "key":
                self.disagree("keys", {"hold": others, "lack": labels}, fqns)
            else:
                first = self._tensors(roots)[fqns[0]]
                says: dict[str, list[str]] = defaultdict(list)
                for item in first:
                    says[_ASPECTS[what](item.value)].append(files[item.rank].label)
                self.disagree(what, says, fqns)

    def _differs(self, held: list[_Held]) -> tuple[str, str, tuple[int, ...]] | None:
        """In what the ranks' parts of a key differ that must be equal, and which ranks say otherwise than most."""
        first = held[0].value
        for what, aspect in _COMPARED.items():
            wanted = aspect(first)
            if all(aspect(item.value) == wanted for item in held[1:]):
                continue
            count = Counter(aspect(item.value) for item in held)
            most = max(count, key=lambda value: count[value])
            return what, "", tuple(item.rank for item in held if aspect(item.value) != most)
        return None

    def _lacking(self, held: list[_Held], known: set[int], files: Mapping[int, _File]) -> tuple[int, ...]:
        """The ranks of a tensor's mesh whose file is there and has not its key."""
        value = held[0].value
        ranks = set(_members(value, held[0].rank)) if isinstance(value, StoredDTensor) else set(files)
        if isinstance(value, StoredDTensor) and len(ranks) < self.world:
            # each group of ranks along the other axes has a mesh of its own; pipeline stages have keys of their own
            ranks = {rank for item in held for rank in _members(item.value, item.rank)}
        return tuple(sorted(ranks & set(files) - known))

    # ------------------------------------------------------------ places

    def _placed(self, fqn: str, held: list[_Held], files: Mapping[int, _File]) -> list[Shape | None]:
        """Where each rank's part lies; None for a copy of what a lower rank holds, and where that is not known."""
        owners: dict[tuple[Shape, Shape], list[_Held]] = defaultdict(list)
        places: list[Shape | None] = []
        for item in held:
            value = item.value
            assert isinstance(value, StoredDTensor)
            coordinate = _coordinate(value.mesh, item.rank)
            expected = (
                None
                if coordinate is None
                else _box(value.shape, value.placements, value.mesh.shape, coordinate, value.order)
            )
            if expected is None:
                return [None] * len(held)
            stored = value.local.shape
            if stored not in (expected[1], expected[2]):
                because = f"{plural(value.mesh.shape[0], 'rank') if len(value.mesh.shape) == 1 else value.mesh}"
                placed = ", ".join(map(str, value.placements))
                label = files[item.rank].label
                self.misfits.append(
                    Misfit(
                        printable(fqn),
                        label,
                        shape_text(stored),
                        shape_text(expected[1]),
                        f"{shape_text(value.shape)} as {placed} over {because}, rank {item.rank}",
                    )
                )
                places.append(None)
                continue
            if stored != expected[1]:  # nobody can tell where torch's other reading puts the rows
                return [None] * len(held)
            key = (expected[0], stored)
            places.append(expected[0] if key not in owners else None)
            owners[key].append(item)
        if len(places) == len(held) and not any(misfit.fqn == printable(fqn) for misfit in self.misfits[-len(held) :]):
            first = held[0].value
            assert isinstance(first, StoredDTensor)
            is_declared = any(placement.kind == "Replicate" for placement in first.placements)
            self._compare(
                fqn, owners.values(), files, "content of copies" if is_declared else "content of other meshes"
            )
            return places
        return [None] * len(held)

    def _add(self, fqn: str, held: list[_Held], places: list[Shape | None], files: Mapping[int, _File]) -> None:
        for item, place in zip(held, places, strict=True):
            value, file = item.value, files[item.rank]
            dtype, shape = _whole(value)
            for tensor in _locals(value):
                storage = file.found.storages.get(tensor.key)
                self.columns.parts.append(Part(fqn, dtype, shape, place, tensor, file.number, storage))

    def _add_shards(self, fqn: str, held: list[_Held], files: Mapping[int, _File]) -> None:
        """Shards say themselves where they lie; each must be the one that all files list for its rank."""
        parts, fits = [], True
        for item in held:
            value, file = item.value, files[item.rank]
            assert isinstance(value, StoredShards)
            for offsets, sizes, tensor in value.locals:
                listed = [place[:2] for place in value.tiling if place[2] in (-1, item.rank)]
                expected = (offsets, sizes) if (offsets, sizes) in listed else (listed or [(offsets, ())])[0]
                if (offsets, tensor.shape) != expected:
                    fits = False
                    self.misfits.append(
                        Misfit(
                            printable(fqn),
                            file.label,
                            f"{shape_text(tensor.shape)} at {shape_text(offsets)}",
                            f"{shape_text(expected[1])} at {shape_text(expected[0])}",
                            f"what all files list for rank {item.rank}",
                        )
                    )
                storage = file.found.storages.get(tensor.key)
                parts.append(Part(fqn, value.dtype, value.shape, offsets, tensor, file.number, storage))
        self.unplaced += [fqn] * (not fits)
        self.columns.parts += parts if fits else [part._replace(offsets=None) for part in parts]

    def _add_slices(self, fqn: str, held: list[_Held], files: Mapping[int, _File]) -> None:
        """A flat tensor that is cut into one slice of equal length for each rank (FSDP1)."""
        lengths = {_whole(item.value)[1] for item in held}
        if len(lengths) > 1:  # told as a disagreement on the shape before
            return
        (length,) = lengths
        whole = (length[0] * self.world,) if len(length) == 1 else length
        for item in held:
            file = files[item.rank]
            for tensor in _locals(item.value):
                place = (item.rank * length[0],) if len(length) == 1 else (0,) * len(length)
                offsets = place if len(length) == 1 or item is held[0] else None
                storage = file.found.storages.get(tensor.key)
                self.columns.parts.append(Part(fqn, tensor.dtype, whole, offsets, tensor, file.number, storage))

    def _compare(self, fqn: str, groups: Iterable[list[_Held]], files: Mapping[int, _File], what: str) -> None:
        """Copies have equal checksums; one that is stored with more than itself is not compared."""
        says: dict[str, list[str]] = defaultdict(list)
        for group in groups:
            if len(group) < 2:
                continue
            found = [(_checksum(item.value, files[item.rank].found), files[item.rank].label) for item in group]
            if len({crc for crc, _ in found if crc}) > 1:
                for crc, label in found:
                    says[f"CRC-32 {crc:08x}"].append(label)
        if says:
            self.disagree(what, says, [fqn], is_sure=what != "content of other meshes")

    # ------------------------------------------------------------ optimizer

    def _optimizer(self) -> None:
        """The optimizer's states under the names of the parameters they belong to, where these are certain."""
        files = self._of("optim")
        states = {
            rank: state for rank, file in files.items() if isinstance(state := file.found.root.get("state"), dict)
        }
        if not states:
            return
        names = self._names_of(states)
        if not names and all(not isinstance(value, StoredTensor) for value in self._moments(states)):
            first = next(iter(files.values()))
            if (made := optimizer_file(first.found.root)) is not None:
                self.beside = (StepFile(first.label, "optimizer state", "read", first.found.size, optimizer=made),)
        roots: dict[int, dict[str, Any]] = {}
        for rank, state in states.items():
            flat = roots[rank] = {}
            for param, own in state.items():
                for what, value in own.items() if isinstance(own, dict) else ():
                    if what != "step":
                        flat[f"optimizer.state.{names.get(param, param)}.{what}"] = value
        self._keys(roots, files, are_slices=True)
        self._steps(states, files)

    def _moments(self, states: Mapping[int, Mapping[Any, Any]]) -> Iterable[Any]:
        """The moments in the first file; FSDP1 keeps slices of flat parameters, which tell no shapes."""
        first = next(iter(states.values()))
        return [own.get("exp_avg") for own in first.values() if isinstance(own, dict)]

    def _names_of(self, states: Mapping[int, Mapping[Any, Any]]) -> dict[Any, str]:
        """Number -> key of the parameter: the parameters in the order of the model, or its adapters alone."""
        file = next(iter(self._of("optim").values()))
        groups = file.found.root.get("param_groups")
        listed = [
            param
            for group in (groups if isinstance(groups, list) else ())
            if isinstance(group, dict) and isinstance(group.get("params"), list)
            for param in group["params"]
        ]
        if any(isinstance(param, str) for param in listed):
            return {param: param for param in listed}
        roots = [file.found.root for file in self._of("model").values()][:1]
        whole = {
            key: value.shape
            for root in roots
            for key, value in root.items()
            if isinstance(value, (StoredDTensor, StoredShards)) and isinstance(key, str)
        }
        first = next(iter(states.values()))
        shapes = {
            param: _whole(own["exp_avg"])[1]
            for param, own in first.items()
            if isinstance(own, dict) and isinstance(own.get("exp_avg"), (StoredTensor, StoredDTensor, StoredShards))
        }
        for chosen in (list(whole), [key for key in whole if is_adapter(parse(key))]):
            if len(chosen) != len(listed) or not chosen:
                continue
            names = dict(zip(sorted(param for param in listed if isinstance(param, int)), chosen, strict=False))
            same = sum(whole[names[param]] == shape for param, shape in shapes.items() if param in names)
            if same >= _SAME_SHAPES * len(shapes) and len(names) == len(listed):
                return names
        return {}

    def _steps(self, states: Mapping[int, Mapping[Any, Any]], files: Mapping[int, _File]) -> None:
        """The step of each parameter is one on all ranks."""
        says: dict[int, list[int]] = defaultdict(list)
        for rank, state in states.items():
            for own in state.values():
                step = own.get("step") if isinstance(own, dict) else None
                if isinstance(step, StoredTensor) and step.shape == ():
                    says[_checksum(step, files[rank].found)].append(rank)
                    break
        if len(says) > 1:
            self.disagree(
                "step",
                {
                    self._step_of(states[ranks[0]], files[ranks[0]]): [files[rank].label for rank in ranks]
                    for ranks in says.values()
                },
            )

    def _step_of(self, state: Mapping[Any, Any], file: _File) -> str:
        for own in state.values():
            step = own.get("step") if isinstance(own, dict) else None
            if isinstance(step, StoredTensor):
                value = number_in(ranges_of(self.folder, file.label), file.found, step)
                return "?" if value is None else f"{value:,}"
        return "?"


# ---------------------------------------------------------------- one value


def _values(root: Any) -> Iterable[Any]:
    """The DTensors and ShardedTensors of a model's or an optimizer's state; all of a file are of one rank."""
    states = root.get("state") if isinstance(root.get("state"), dict) else {}
    for value in (*root.values(), *(part for own in states.values() if isinstance(own, dict) for part in own.values())):
        if isinstance(value, (StoredDTensor, StoredShards)):
            yield value


def _writer(value: Stored) -> int:
    """The rank that wrote a value, as the value itself says; -1 where it does not."""
    if isinstance(value, StoredDTensor):
        return value.mesh.rank
    return value.rank if isinstance(value, StoredShards) else -1


def _world(value: Stored) -> int:
    """Ranks of the world that a value is cut over; 0 where that is not known."""
    if isinstance(value, StoredDTensor):
        return len(value.mesh.ranks) if value.mesh.spans_world else 0
    if isinstance(value, StoredShards):
        return value.world
    return 0


def _whole(value: Stored) -> tuple[str, Shape]:
    return value.dtype, value.shape


def _locals(value: Stored) -> list[StoredTensor]:
    if isinstance(value, StoredTensor):
        return [value]
    return [value.local] if isinstance(value, StoredDTensor) else [tensor for _, _, tensor in value.locals]


_COMPARED: dict[str, Any] = {
    "form": type,
    "dtype": lambda value: value.dtype,
    "global shape": lambda value: value.shape,
    "placements": lambda value: value.placements if isinstance(value, StoredDTensor) else (),
    "mesh": lambda value: _mesh_key(value),
    "tiling": lambda value: value.tiling if isinstance(value, StoredShards) else (),
}
"""What all ranks must say alike of a key."""


def _mesh_key(value: Stored) -> Hashable:
    """What all ranks must say of a mesh: of a part of a larger one the members differ."""
    if not isinstance(value, StoredDTensor):
        return ()
    mesh = value.mesh
    ranks = mesh.ranks if mesh.spans_world else len(mesh.ranks)
    return mesh.names, mesh.shape, mesh.strides, ranks


_FORMS = {StoredTensor: "a plain tensor", StoredDTensor: "a DTensor", StoredShards: "a ShardedTensor"}

_ASPECTS: dict[str, Any] = {
    "form": lambda value: _FORMS[type(value)],
    "dtype": lambda value: value.dtype,
    "global shape": lambda value: shape_text(value.shape),
    "placements": lambda value: "(" + ", ".join(map(str, value.placements)) + ")",
    "mesh": lambda value: f"{value.mesh} of ranks {ranges(set(value.mesh.ranks))}",
    "tiling": lambda value: f"{plural(len(value.tiling), 'shard')}",
}


def _members(value: Any, rank: int) -> tuple[int, ...]:
    """The ranks of the mesh that a rank is in: those that differ from it on the mesh's own axes alone."""
    if not isinstance(value, StoredDTensor):
        return (rank,)
    return _mesh_members(value.mesh.shape, value.mesh.strides, value.mesh.ranks, rank)


@cache
def _mesh_members(shape: Shape, strides: Shape, ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if rank not in ranks:
        return (rank,)
    at = ranks.index(rank)
    places = {at}
    for size, stride in zip(shape, strides, strict=True):
        places = {place - place // stride % size * stride + i * stride for place in places for i in range(size)}
    return tuple(ranks[place] for place in sorted(places) if place < len(ranks))


def _coordinate(mesh: Mesh, rank: int) -> Shape | None:
    return _coordinate_of(mesh.shape, mesh.strides, mesh.ranks, rank)


@cache
def _coordinate_of(shape: Shape, strides: Shape, ranks: tuple[int, ...], rank: int) -> Shape | None:
    """Where a rank is on a mesh; None where it is not on it."""
    if rank not in ranks or 0 in strides or 0 in shape:
        return None
    at = ranks.index(rank)
    return tuple(at // stride % size for size, stride in zip(shape, strides, strict=True))


@cache
def _box(
    shape: Shape, placements: tuple[Placement, ...], mesh: Shape, coordinate: Shape, order: tuple[int, ...] | None
) -> tuple[Shape, Shape, Shape] | None:
    """Offsets and sizes of a rank's part, and the sizes that torch's own reading of the placements gives.

    A `_StridedShard` stands to the left of the axes that cut the dim before it: the tensor was cut by these first
    (tensor parallel, then FSDP). torch reads placements from left to right; where the dim does not divide, the rows
    that it takes for those of a rank are others.

    Source:
        torch.distributed.tensor._utils (torch 2.13)
    """
    known = ("Shard", "_StridedShard", "Replicate")
    if any(placement.kind not in known or (placement.dim or 0) >= max(len(shape), 1) for placement in placements):
        return None
    if any(placement.kind != "Replicate" and placement.dim is None for placement in placements) or (
        not shape and any(placement.dim is not None for placement in placements)
    ):
        return None
    by_torch = box(runs(shape, placements, mesh, coordinate, order), shape)
    strided = [axis for axis, placement in enumerate(placements) if placement.split_factor is not None]
    if not strided:
        return (*by_torch, by_torch[1])
    plain = [Placement("Shard", placement.dim) if placement.dim is not None else placement for placement in placements]
    first = [axis for axis in range(len(placements)) if axis not in strided]
    held = box(runs(shape, plain, mesh, coordinate, [*first, *reversed(strided)]), shape)
    return (*held, by_torch[1])


def _checksum(value: Stored, found: TorchFile) -> int:
    """CRC-32 of a tensor that fills its storage; 0 where there is none, or more lies there."""
    parts = _locals(value)
    if len(parts) != 1 or parts[0].extent != parts[0].length:
        return 0
    place = found.storages.get(parts[0].key)
    return place.crc if place is not None else 0


def _checksums(found: TorchFile) -> tuple[int, ...]:
    """The checksums of the storages of a file; () where there are none."""
    return tuple(place.crc for place in found.storages.values()) if any(p.crc for p in found.storages.values()) else ()
