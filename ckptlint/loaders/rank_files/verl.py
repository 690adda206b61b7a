"""verl's checkpoints and those of its family: for each rank a file of the model, the optimizer and other state.

A model file is a dict of DTensors (FSDP2, FSDP1 with a mesh) or ShardedTensors (FSDP1 without), and of plain tensors
that every rank holds whole. From mesh, placements and the rank in the name follows what a file must hold of a tensor.

Source: verl 0.9.1 verl/utils/checkpoint/fsdp_checkpoint_manager.py; SkyRL, oumi and lmms-engine write the same names
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptlint.errors import LimitError
from ckptlint.formats.torch_file import number_in, ranges_of
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.optimizer_state import optimizer_file
from ckptlint.loaders.rank_files.statements import Statements, checksum, checksums
from ckptlint.loaders.readers.common_state import read_configs
from ckptlint.loaders.readers.plain import state_of
from ckptlint.loaders.readers.sets import FileSet, flat_name, flat_sets, verl_name, verl_sets
from ckptlint.loaders.readers.torch_files import Columns, OpenedFile, SetFiles, is_dict, read_file
from ckptlint.model import Checkpoint, Misfit, Problem, RankFile, RankFileSet, StepFile, empty_objects
from ckptlint.model.cover import Shape
from ckptlint.model.facts import fact
from ckptlint.model.stored import Placement, Stored, StoredDTensor, StoredShards, StoredTensor
from ckptlint.model.text import plural, printable, ranges, shape_text, verb
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.keys import is_adapter, parse
from ckptlint.vocabulary.mesh import read_topology
from ckptlint.vocabulary.placements import bounding_box, runs

_CONFIG = "fsdp_config.json"
_CONFIG_LIMIT = 65536
_RANKS_LIMIT = 2**16
_KINDS = {"model": "model", "optim": "optimizer", "extra_state": "random state"}
_FLAT = "_flat_param"  # how FSDP1 names the one parameter that it makes of a module's
_SAME_SHAPES = 0.9  # least share of states with the shape of the parameter that they are assigned to


def read_verl(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The set of rank files in a folder; raises LimitError for more ranks than any job has, AccessError as it reads."""
    sets = verl_sets(folder)
    file_set = _chosen(folder, sets)
    world = verl_name(file_set.files[0])[1]
    if world > _RANKS_LIMIT:
        raise LimitError(f"counts {world:,} ranks in its name, the limit is {_RANKS_LIMIT:,}")
    files, reader = SetFiles(folder, look_at_files), _RankReader(world)
    for name in file_set.files:
        kind, _, rank = verl_name(name)
        if (opened := files.open(name, _KINDS[kind], {"rank": rank}, "dict", is_dict)) is not None:
            reader.files[kind, rank] = opened
    reader.read(folder)
    if (stated := _stated_world(folder)) is not None:
        worlds = [*((world, file.name) for file in files.files), (stated, _CONFIG)]
        reader.statements.note_if_different("world size", worlds)
    for leftover in sets:
        if leftover is not file_set:
            what = f"{plural(len(leftover.files), 'file')} of world size {verl_name(leftover.files[0])[1]}"
            sentence = f"ckptlint did not read {what} beside those of world size {world}"
            why = "they are probably left from another save into this folder"
            files.problems.append(Problem("note", printable(leftover.files[0]), sentence, why=why))
    files.problems += _beyond(folder)
    grid = {f"the world size {world} in the names of the files": _expected(folder, file_set, world)}
    rank_files = reader.statements.of(files.files, grid)
    return replace(_checkpoint(files, reader, rank_files), format="verl")


def read_flat(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The newest set of FSDP1 files in a folder, each with one rank's part of the flat parameters.

    Raises AccessError where a read is refused.

    Source: torch 2.13 FullyShardedDataParallel with StateDictType.LOCAL_STATE_DICT; dinov2.fsdp.FSDPCheckpointer
    """
    file_set, *older = flat_sets(folder)
    save, last = flat_name(file_set.files[-1])
    extension = file_set.files[-1].rpartition(".")[2]
    files, opened = SetFiles(folder, look_at_files), dict[int, OpenedFile]()
    for name in file_set.files:
        rank = flat_name(name)[1]
        if (file := files.open(name, "model", {"rank": rank}, "dict", is_dict)) is not None:
            opened[rank] = file
    models = {rank: _inner(file, state_of(file.torch_file.root)) for rank, file in opened.items()}
    worlds = [(_world(value), file.label) for file in models.values() for value in _values(file.torch_file.root)]
    world, where = max(worlds, default=(0, ""))
    reader = _RankReader(world or last + 1, is_flat=True)
    for rank, file in opened.items():
        reader.files["model", rank] = models[rank]
        if is_dict(optimizer := file.torch_file.root.get("optimizer")):
            reader.files["optim", rank] = _inner(file, optimizer)
    steps = [(file.torch_file.root.get("iteration"), file.label) for file in opened.values()]
    reader.statements.note_if_different("step", [item for item in steps if type(item[0]) is int], text="{:,}".format)
    reader.read(folder)
    for names in (of_save.files for of_save in older):
        sentence = f"ckptlint did not read {plural(len(names), 'file')} of another save beside {save}*"
        files.problems.append(Problem("note", printable(names[0]), sentence, why="ckptlint reads the newest one"))
    grid = f"{where} holds tensors of {plural(world, 'rank')}" if world else "the numbers in the names of the files"
    expected = [RankFile(f"{save}{rank}.{extension}", "model", {"rank": rank}) for rank in range(reader.world)]
    return _checkpoint(files, reader, reader.statements.of(files.files, {grid: expected}))


@fact
def writer_of(folder: Folder, name: str) -> int | None:
    """The rank that wrote the sharded tensors in a file, -1 where they do not say; None for a file without any."""
    torch_file = read_file(folder, name, [])
    values = _values(state_of(torch_file.root) or {}) if torch_file is not None and is_dict(torch_file.root) else ()
    return next(map(_writer, values), None)


def _inner(file: OpenedFile, root: Any) -> OpenedFile:
    """A file reduced to one part of its value."""
    return replace(file, torch_file=file.torch_file._replace(root=root if is_dict(root) else {}))


def _checkpoint(files: SetFiles, reader: _RankReader, rank_files: RankFileSet) -> Checkpoint:
    lost = [file for missing in rank_files.missing.values() for file in missing]
    absent = [*lost, *(file for file in files.files if not file.is_read)]
    doubtful = sum(file.kind != "random state" for file in absent) + len(reader.left_out)
    lack = f"rank files {verb(doubtful, 'is')} missing or unusable"
    partial = f"{doubtful} of {len(files.files) + len(lost)} {lack}" if doubtful else ""
    if reader.unplaced and not doubtful:
        partial = f"the rank files contradict each other on {plural(len(reader.unplaced), 'key')}"
    first, last = files.files[0].name, files.files[-1].name
    label = f"{first} .. {last}" if first != last else first
    readable = any(kind != "extra_state" for kind, _ in reader.files)
    if not readable and not files.problems and any(file.kind == "model" for file in lost):
        sentence, why = f"no rank has a file of the model beside {label}", "they hold random states alone"
        files.problems.append(Problem("incomplete", label, sentence, why=why, blocks=True))
    declared, config, config_problems = read_configs(files.folder, None)
    if reader.updates is not None:  # no claim: a rollout takes several updates
        files.param_groups = [(place, {"step": reader.updates, **group}) for place, group in files.param_groups]
    return files.checkpoint(
        reader.columns,
        rank_files,
        format="fsdp-ranks",
        declared=declared,
        config=config,
        topology=read_topology(declared, empty_objects(), None, range(reader.world)),
        step_files=reader.step_files,
        problems=files.problems + config_problems,
        readable=readable,
        partial_because=partial,
        metadata_file=label,
    )


def _expected(folder: Folder, file_set: FileSet, world: int) -> list[RankFile]:
    """A file for each rank of each kind present, and of the model unless a subfolder holds its weights.

    Source: verl 0.9.1 BaseCheckpointManager: `checkpoint_save_contents` may have `hf_model` in place of `model`
    """
    there = {verl_name(name)[0] for name in file_set.files}
    if not any(name.endswith((".safetensors", ".bin")) for sub in folder.folders() for name in folder.sub(sub).files()):
        there.add("model")
    return [
        RankFile(f"{kind}_world_size_{world}_rank_{rank}.pt", shown, {"rank": rank})
        for kind, shown in _KINDS.items()
        if kind in there
        for rank in range(world)
    ]


def _chosen(folder: Folder, sets: list[FileSet]) -> FileSet:
    """The set with the world size in `fsdp_config.json`; else the set with the largest share of its files."""
    stated = _stated_world(folder)

    def rank(file_set: FileSet) -> tuple[bool, float, int]:
        world = verl_name(file_set.files[0])[1]
        models = sum(name.startswith("model_") for name in file_set.files)
        return world == stated, models / world, world

    return max(sets, key=rank)


def _stated_world(folder: Folder) -> int | None:
    stated = read_json(folder, _CONFIG, _CONFIG_LIMIT)[0].get("world_size")
    return stated if type(stated) is int and 0 < stated < 2**31 else None


def _beyond(folder: Folder) -> Iterator[Problem]:
    """Problems for files whose rank exceeds the world size in their own name."""
    named = ((printable(name), *verl_name(name)[1:]) for name in folder.files_beside() if verl_name(name)[0])
    why = "no load reads it, so its content belongs to another file or to none"
    hint = "compare it with the files of the node that wrote it"
    for label, world, rank in named:
        if rank >= world:
            sentence = f"{label} is named for rank {rank:,} of {world:,}, but there is no such rank"
            yield Problem("unreadable", label, sentence, why=why, hint=hint, outside_checkpoint=True)


class _RankValue(NamedTuple):
    rank: int
    value: Stored
    file: OpenedFile


class _Piece(NamedTuple):
    """A tensor in a rank's file, with the offsets that its value states."""

    rank: int
    file: OpenedFile
    offsets: Shape
    tensor: StoredTensor


Places = list[Shape | None]
_Sharded = StoredDTensor | StoredShards


@dataclass(slots=True)
class _RankReader:
    """Reads the files of all ranks, compares their statements and places their parts."""

    world: int
    is_flat: bool = False
    files: dict[tuple[str, int], OpenedFile] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)
    statements: Statements = field(default_factory=Statements)
    left_out: set[str] = field(default_factory=set)
    unplaced: list[str] = field(default_factory=list)
    step_files: tuple[StepFile, ...] = ()
    updates: int | None = None

    def read(self, folder: Folder) -> None:
        """Fill everything but `files`."""
        self._worlds()
        self._names()
        self._keys({rank: file.torch_file.root for rank, file in self._of("model").items()}, self._of("model"))
        self._optimizer(folder)
        states = ((file.torch_file.root.get("lr_scheduler"), file.label) for file in self._of("extra_state").values())
        epochs = ((scheduler.get("last_epoch"), label) for scheduler, label in states if is_dict(scheduler))
        steps = [(step, label) for step, label in epochs if type(step) is int]
        self.statements.note_if_different("step", steps, text="{:,}".format)

    def _of(self, kind: str) -> dict[int, OpenedFile]:
        """Rank -> its file of a kind, without those that belong elsewhere."""
        return {
            rank: file
            for (file_kind, rank), file in self.files.items()
            if file_kind == kind and file.label not in self.left_out
        }

    # ------------------------------------------------------------ whole files

    def _worlds(self) -> None:
        """Compare the world sizes that meshes span with the names; files of another world are left out."""
        named = self.world
        worlds = ((map(_world, _values(file.torch_file.root)), file.label) for file in self.files.values())
        firsts = ((next((size for size in of_file if size > 0), 0), label) for of_file, label in worlds)
        sizes = [(size, label) for size, label in firsts if size]
        things = [(f"a mesh of {plural(size, 'rank')}", label) for size, label in sizes]
        if sizes and all(size != named for size, _ in sizes):
            things.append((f"{plural(named, 'rank')} in the names", next(iter(self.files.values())).label))
        self.statements.note_if_different("world size", things)
        self.left_out = {label for size, label in sizes if size != named}

    def _names(self) -> None:
        """Compare the rank in each name with the rank that wrote the file."""
        for (kind, rank), file in self.files.items():
            if file.label in self.left_out:
                continue
            writer = next((stated for value in _values(file.torch_file.root) if (stated := _writer(value)) >= 0), -1)
            named = verl_name(f"{file.torch_file.prefix}.pt")
            # Values of DTensors and ShardedTensors state their rank. Others do not, but torch.save names the folder in
            # the archive after the file as first written, which a copy or rename keeps (broken_verl_copied_rank).
            by = writer if writer >= 0 else named[2] if named[:2] == (kind, self.world) else -1
            if by not in (-1, rank):
                inside = f"rank {by}"
            elif named[0] == kind and named[1:] != (self.world, rank):
                inside = f"rank {named[2]} of {named[1]}"
            else:
                continue
            original = self.files.get((kind, by)) if by != rank else None
            sums = checksums(file.torch_file)
            same = original.label if original is not None and sums and checksums(original.torch_file) == sums else ""
            self.statements.other_name(file.label, inside, same, writer not in (-1, rank))
        self.left_out |= self.statements.elsewhere()

    # ------------------------------------------------------------ keys

    def _keys(
        self, roots: Mapping[int, Mapping[Any, Any]], files: Mapping[int, OpenedFile], slices: bool = False
    ) -> None:
        """Place the ranks' parts of each key, unless ranks contradict each other; plain tensors may be `slices`."""
        keys: dict[str, list[_RankValue]] = {}
        for rank, root in roots.items():
            for key, value in root.items():
                if isinstance(key, str) and isinstance(value, Stored):
                    keys.setdefault(key, []).append(_RankValue(rank, value, files[rank]))
        for fqn, values in keys.items():
            pieces = [_Piece(item.rank, item.file, *local) for item in values for local in _locals(item.value)]
            offsets_of_pieces: Places = [None] * len(pieces)
            first, shape = values[0].value, values[0].value.shape
            # A plain tensor states no placement. In a model it is a buffer with a copy on each rank, in an FSDP1
            # optimizer a slice of a flat parameter (verl_fsdp1_2r). Different contents of one-dimensional tensors also
            # show slices (flat_2r).
            is_copy = isinstance(first, StoredTensor) and not slices and not fqn.endswith(_FLAT)
            if is_copy:
                offsets_of_pieces[0] = (0,) * len(shape)
            is_slice = self.is_flat and _is_sliced(values)
            if is_slice and self._agree(fqn, values, files, ("form", "dtype")):
                lengths = [item.value.shape[0] for item in values]
                shape = (sum(lengths),)
                offsets_of_pieces = [(end - length,) for end, length in zip(accumulate(lengths), lengths, strict=True)]
            elif not is_slice and self._agree(fqn, values, files):
                if isinstance(first, StoredDTensor):
                    offsets_of_pieces = self._boxes(fqn, values)
                elif isinstance(first, StoredShards):
                    offsets_of_pieces = self._listed(fqn, first, pieces)
                elif is_copy:
                    self._copies("content", fqn, [values])
                elif len(shape) == 1:  # cut into one slice of equal length for each rank (FSDP1)
                    shape, offsets_of_pieces = (shape[0] * self.world,), [(piece.rank * shape[0],) for piece in pieces]
                else:
                    offsets_of_pieces[0] = (0,) * len(shape)
            if pieces and not any(offsets is not None for offsets in offsets_of_pieces):
                self.unplaced.append(fqn)
            for piece, offsets in zip(pieces, offsets_of_pieces, strict=True):
                is_flat = is_slice or fqn.endswith(_FLAT)
                file = piece.file
                self.columns.add(fqn, piece.tensor, file.number, file.torch_file, shape, offsets, is_flat, first.dtype)

    def _agree(
        self, fqn: str, values: list[_RankValue], files: Mapping[int, OpenedFile], aspects: Iterable[str] | None = None
    ) -> bool:
        """Whether all ranks agree on aspects of a key (`_ASPECTS`, or all), and every rank of its mesh holds it."""
        things = [(item.value, item.file.label) for item in values]
        note = self.statements.note_if_different
        if not all(note(what, things, fqn, *_ASPECTS[what]) for what in aspects or _ASPECTS):
            return False
        lacking = files.keys() - {item.rank for item in values}
        if isinstance(values[0].value, StoredDTensor):
            # each group of ranks along the other axes has a mesh of its own; pipeline stages have keys of their own
            meshes = ((item.value.mesh, item.rank) for item in values if isinstance(item.value, StoredDTensor))
            lacking &= {member for mesh, rank in meshes for member in mesh.group_of(rank)}
        if not lacking:
            return True
        holds = [(("lack" if rank in lacking else "hold"), file.label) for rank, file in files.items()]
        return self.statements.note_if_different("keys", sorted(holds), fqn)

    def _boxes(self, fqn: str, values: list[_RankValue]) -> Places:
        """Offsets of each rank's part of a DTensor; None for a copy of a lower rank's, for all where one is unknown."""
        nowhere: Places = [None] * len(values)
        owners: dict[tuple[Shape, Shape], list[_RankValue]] = defaultdict(list)
        offsets_of_parts, fits, is_declared = list[Shape | None](), True, False
        for item in values:
            value = item.value
            assert isinstance(value, StoredDTensor)
            coordinate = value.mesh.place_of(item.rank)
            of_mesh = value.shape, value.placements, value.mesh.shape
            if coordinate is None or (expected := _box(*of_mesh, coordinate, value.order)) is None:
                return nowhere
            offsets, sizes, by_torch = expected
            stored = value.local.shape
            # TP then FSDP2 gives a _StridedShard, whose rows torch 2.13 reads in another order where they do not divide
            # (verl_tp2_fsdp2: 10 rows over 4 ranks). Either size is legal, but only the derived one says where the rows
            # belong.
            if stored not in (sizes, by_torch):
                over = plural(value.mesh.shape[0], "rank") if len(value.mesh.shape) == 1 else value.mesh
                placed = ", ".join(map(str, value.placements))
                because = f"{shape_text(value.shape)} as {placed} over {over}, rank {item.rank}"
                self._misfit(fqn, item.file, shape_text(stored), shape_text(sizes), because)
            fits = fits and stored == sizes
            is_declared = any(placement.kind == "Replicate" for placement in value.placements)
            offsets_of_parts.append(offsets if (offsets, stored) not in owners else None)
            owners[offsets, stored].append(item)
        if not fits:
            return nowhere
        self._copies("content of copies" if is_declared else "content of other meshes", fqn, owners.values())
        return offsets_of_parts

    def _listed(self, fqn: str, whole: StoredShards, pieces: list[_Piece]) -> Places:
        """Offsets that the shards state; all None where one differs from the entry that all files list for its rank."""
        fits = True
        for rank, file, offsets, tensor in pieces:
            listed = [place[:2] for place in whole.tiling if place[2] in (-1, rank)]
            same = [place for place in listed if place[0] == offsets]
            stored, wanted = (offsets, tensor.shape), (same or listed or [(offsets, ())])[0]
            if stored != wanted:
                fits = False
                has, should = (f"{shape_text(size)} at {shape_text(begin)}" for begin, size in (stored, wanted))
                self._misfit(fqn, file, has, should, f"what all files list for rank {rank}")
        return [piece.offsets if fits else None for piece in pieces]

    def _misfit(
        self, fqn: str, file: OpenedFile, stored: str, expected: str, because: str, what: str = "shape"
    ) -> None:
        self.statements.misfits.append(Misfit(printable(fqn), file.label, stored, expected, because, what))

    def _copies(self, what: str, fqn: str, groups: Iterable[list[_RankValue]]) -> None:
        several = (group for group in groups if len(group) > 1)
        self.statements.copies(what, [[(_checksum(item), item.file.label) for item in group] for group in several], fqn)

    # ------------------------------------------------------------ optimizer

    def _optimizer(self, folder: Folder) -> None:
        """Add the optimizer states, under their parameters' names where these are certain."""
        files = self._of("optim")
        states = {rank: state for rank, file in files.items() if is_dict(state := file.torch_file.root.get("state"))}
        if not states:
            return
        listed = {rank: _params(file.torch_file.root) for rank, file in files.items()}
        first, file = next(((state, files[rank]) for rank, state in states.items() if state), ({}, files[min(files)]))
        moments = [of_param.get("exp_avg") for of_param in first.values() if isinstance(of_param, dict)]
        names = self._names_of(listed[min(files)], first)
        self._count(listed, states, is_named=bool(names))
        # FSDP1 keeps slices of flat parameters, which show no shapes
        is_sliced = any(isinstance(value, StoredTensor) for value in moments)
        if not names and not is_sliced and (made := optimizer_file(file.torch_file.root)) is not None:
            self.step_files = (StepFile(file.label, "optimizer state", "read", file.torch_file.size, optimizer=made),)
        roots = {
            rank: {
                f"optimizer.state.{names.get(param, param)}.{what}": value
                for param, of_param in state.items()
                if isinstance(of_param, dict)
                for what, value in of_param.items()
                if what != "step"
            }
            for rank, state in states.items()
        }
        self._keys(roots, files, slices=True)
        if any(item.what == "step" for item in self.statements.noted):
            return  # reported by what the files count themselves
        steps = []
        for rank, state in states.items():  # each parameter counts for itself, all alike
            counted = (of_param.get("step") for of_param in state.values() if is_dict(of_param))
            if step := next((step for step in counted if isinstance(step, StoredTensor) and not step.shape), None):
                steps.append(((step, files[rank]), files[rank].label))

        def number(counted: tuple[StoredTensor, OpenedFile]) -> int | None:
            step, file = counted
            return number_in(ranges_of(folder, file.label), file.torch_file, step)

        def text(counted: tuple[StoredTensor, OpenedFile]) -> str:
            return "?" if (value := number(counted)) is None else f"{value:,}"

        self.updates = number(steps[0][0]) if steps else None
        self.statements.note_if_different(
            "step", steps, by=lambda step: checksum(step[0], step[1].torch_file), text=text
        )

    def _count(self, listed: Mapping[int, list[Any]], states: Mapping[int, dict[Any, Any]], is_named: bool) -> None:
        """Compare the number of parameters in each rank's optimizer with the model; of FSDP1's slices, the elements."""
        if len({len(state) for state in states.values()}) > 1:
            return  # the ranks' keys differ, which is reported
        files, model = self._of("optim"), self._of("model")
        counts = [(len(params), files[rank].label) for rank, params in listed.items()]
        is_alike = self.statements.note_if_different("number of parameters in the optimizer", counts)
        if not is_alike or is_named or not model:
            return
        parameters = _parameters(next(iter(model.values())).torch_file.root)
        chosen = [key for key in parameters if is_adapter(parse(key))] or list(parameters)
        file = model[min(model)]
        # Tied parameters have two keys, but one entry in the optimizer: equal checksum and shape count once.
        once = {
            (_checksum(_RankValue(-1, parameters[key], file)) or key, parameters[key].shape): parameters[key]
            for key in chosen
        }
        known, wanted, noun = counts[0][0], len(once), "parameter"
        of_params = (of_param for state in states.values() for of_param in state.values() if is_dict(of_param))
        moments = (of_param.get("exp_avg") for of_param in of_params)
        slices = [prod(value.shape) for value in moments if isinstance(value, StoredTensor) and value.shape]
        if slices:
            known = sum(slices) if len(states) == self.world else 0
            wanted, noun = sum(prod(value.shape) for value in once.values()), "element"
        for rank in files if 0 < known < wanted else ():
            because = f"the model in {file.label} has as many"
            self._misfit("", files[rank], f"the states of {plural(known, noun)}", f"{wanted:,}", because, "count")

    def _names_of(self, listed: list[Any], state: Mapping[Any, Any]) -> dict[Any, str]:
        """Number -> key of its parameter, in model order: all parameters, or only adapters; {} where uncertain."""
        if any(isinstance(param, str) for param in listed):
            return {param: param for param in listed}
        roots = [file.torch_file.root for file in self._of("model").values()][:1]
        shapes_of_keys = {key: value.shape for root in roots for key, value in _parameters(root).items()}
        moments = {param: states.get("exp_avg") for param, states in state.items() if is_dict(states)}
        shapes = {param: moment.shape for param, moment in moments.items() if isinstance(moment, Stored)}
        # The optimizer lists numbers without names. Order alone is a guess, so the counts must agree and nine of ten
        # states must have the shape of their parameter; not all, since one damaged state must not hide the others.
        for chosen in (list(shapes_of_keys), [key for key in shapes_of_keys if is_adapter(parse(key))]):
            if len(chosen) != len(listed) or not chosen:
                continue
            names = dict(zip(sorted(param for param in listed if isinstance(param, int)), chosen, strict=False))
            same = sum(shapes_of_keys[names[param]] == shape for param, shape in shapes.items() if param in names)
            if same >= _SAME_SHAPES * len(shapes) and len(names) == len(listed):
                return names
        return {}


def _params(root: Mapping[Any, Any]) -> list[Any]:
    """The parameters that an optimizer lists in its groups."""
    groups = root.get("param_groups")
    listed = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [param for params in listed if isinstance(params, list) for param in params]


def _parameters(root: Mapping[Any, Any]) -> dict[str, _Sharded]:
    """Key -> sharded value in a model's file; plain tensors are buffers."""
    return {key: value for key, value in root.items() if isinstance(key, str) and isinstance(value, _Sharded)}


def _values(root: Any) -> Iterable[_Sharded]:
    """The DTensors and ShardedTensors of a model's or an optimizer's state; all belong to one rank."""
    states = root.get("state") if is_dict(root.get("state")) else {}
    of_params = (value for of_param in states.values() if is_dict(of_param) for value in of_param.values())
    return (value for value in (*root.values(), *of_params) if isinstance(value, _Sharded))


def _writer(value: _Sharded) -> int:
    """The rank that a value states as its writer; -1 without one."""
    return value.mesh.rank if isinstance(value, StoredDTensor) else value.rank


def _world(value: _Sharded) -> int:
    """Number of ranks of the world that a value is cut over; 0 where unknown."""
    if isinstance(value, StoredShards):
        return value.world
    return len(value.mesh.ranks) if value.mesh.spans_world else 0


def _locals(value: Stored) -> list[tuple[Shape, StoredTensor]]:
    """(offsets, tensor) of each local part of a value; offsets are () where it states none."""
    if isinstance(value, StoredShards):
        return [(offsets, tensor) for offsets, _, tensor in value.locals]
    return [((), value.local if isinstance(value, StoredDTensor) else value)]


def _is_sliced(values: list[_RankValue]) -> bool:
    """Whether plain one-dimensional tensors are slices of an FSDP1 flat parameter rather than copies.

    Source: torch 2.13 torch.distributed.fsdp, use_orig_params: a rank without a part of a parameter holds 0 elements
    """
    if not all(isinstance(item.value, StoredTensor) and len(item.value.shape) == 1 for item in values):
        return False
    return len({(item.value.shape, _checksum(item)) for item in values}) > 1


def _checksum(item: _RankValue) -> int:
    """CRC-32 of a rank's part, if it is one tensor that fills its storage; else 0."""
    shards = _locals(item.value)
    return checksum(shards[0][1], item.file.torch_file) if len(shards) == 1 else 0


def _mesh_key(value: Stored) -> Hashable:
    """The properties of a mesh that all ranks must share; members of a submesh differ by rank."""
    if not isinstance(value, StoredDTensor):
        return ()
    mesh = value.mesh
    ranks = mesh.ranks if mesh.spans_world else len(mesh.ranks)
    return mesh.names, mesh.shape, mesh.strides, ranks


_FORMS = {StoredTensor: "a plain tensor", StoredDTensor: "a DTensor", StoredShards: "a ShardedTensor"}

_ASPECTS: dict[str, tuple[Callable[[Any], Hashable], Callable[[Any], str]]] = {
    "form": (type, lambda value: _FORMS[type(value)]),
    "dtype": (lambda value: value.dtype, lambda value: str(value.dtype)),
    "global shape": (lambda value: value.shape, lambda value: shape_text(value.shape)),
    "placements": (
        lambda value: value.placements if isinstance(value, StoredDTensor) else (),
        lambda value: "(" + ", ".join(map(str, value.placements)) + ")",
    ),
    "mesh": (_mesh_key, lambda value: f"{value.mesh} of ranks {ranges(set(value.mesh.ranks))}"),
    "tiling": (
        lambda value: value.tiling if isinstance(value, StoredShards) else (),
        lambda value: plural(len(value.tiling), "shard"),
    ),
}
"""Aspect of a key -> (compared value, text for messages)."""


@cache
def _box(
    shape: Shape, placements: tuple[Placement, ...], mesh: Shape, coordinate: Shape, order: tuple[int, ...] | None
) -> tuple[Shape, Shape, Shape] | None:
    """(offsets, sizes, sizes by torch) of a rank's part; None for placements that are not understood.

    A `_StridedShard` is cut after the plain shards to its right (tensor parallel, then FSDP). torch reads placements
    from left to right, and assigns other rows to a rank where the dim does not divide.

    Source: torch.distributed.tensor._utils (torch 2.13)
    """
    known = ("Shard", "_StridedShard", "Replicate")
    for placement in placements:
        if placement.kind not in known or (placement.dim or 0) >= max(len(shape), 1):
            return None
        if placement.kind != "Replicate" and placement.dim is None:
            return None
        if placement.dim is not None and not shape:
            return None
    by_torch = bounding_box(runs(shape, placements, mesh, coordinate, order), shape)
    strided = [axis for axis, placement in enumerate(placements) if placement.split_factor is not None]
    if not strided:
        return (*by_torch, by_torch[1])
    plain = [Placement("Shard", placement.dim) if placement.dim is not None else placement for placement in placements]
    first = [axis for axis in range(len(placements)) if axis not in strided]
    values = bounding_box(runs(shape, plain, mesh, coordinate, [*first, *reversed(strided)]), shape)
    return (*values, by_torch[1])
