"""Derives the rank grid of a DeepSpeed job from the files of a tag, and the files that the grid must have."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptlint.errors import CkptlintError, LimitError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.rank_files.deepspeed_files import (
    Source,
    Tag,
    configured_stage,
    count_of,
    dict_of,
    partition_counts,
    shapes_of,
    version_of,
    zero_stage,
)
from ckptlint.model import AxisSize, Misfit, RankFile, StepClaim
from ckptlint.model.text import printable, ranges
from ckptlint.storage.folder import Folder


@dataclass(frozen=True, slots=True)
class GridFacts:
    """The job that the files describe, with the number of experts in each layer of experts.

    Attributes:
        dp, tp, mp: sizes of the grid: data parallel, tensor parallel, and model parallel files (tensor x pipeline).
        dp_source, mp_source: entry and file with that size; "" where only file names show it.
        stage: of ZeRO; 0 where unknown.
        sharded_model: whether each data parallel rank has its own model states (stage 3).
    """

    dp: int
    tp: int
    mp: int
    dp_source: str
    mp_source: str
    stage: int
    experts: tuple[int, ...]
    experts_source: str
    sharded_model: bool
    writer: str
    claims: tuple[StepClaim, ...]

    @property
    def topology(self) -> dict[str, AxisSize]:
        """The sizes that a file states, by axis."""
        axes = {"dp": (self.dp, self.dp_source), "tp": (self.tp, self.mp_source)}
        axes["pp"] = (self.mp // self.tp, self.mp_source)
        return {axis: AxisSize(size, "metadata") for axis, (size, source) in axes.items() if source}


def grid_facts_of(tag: Tag) -> GridFacts:
    models, optimizers = list(tag.of("model")), list(tag.of("optimizer"))
    named = {
        what: 1 + max((f.numbers.get(what, -1) for f in tag.files.files), default=-1) for what in ("dp", "mp", "tp")
    }
    # Sizes in the files come before numbers in the names: the names miss the last ranks exactly when their files are
    # lost (broken_lost_optimizer).
    dp, dp_source = _first(optimizers, "partition_count", lambda root, state: max(partition_counts(state), default=0))
    if not dp:
        dp, dp_source = _first(models, "dp_world_size", lambda root, _: count_of(root.get("dp_world_size")))
    mp, mp_source = _first(models, "mp_world_size", lambda root, _: count_of(root.get("mp_world_size")))
    mp = mp or max(named["mp"], 1)
    is_pipeline = any(file.kind == "layer" for file in tag.files.files)
    tp, _ = _first(models, "tp_degree", lambda root, _: _tp_degree(root, mp))
    stage, _ = _first(optimizers, "zero_stage", lambda _, state: zero_stage(state))
    if not stage:
        stage, _ = _first((*models, *optimizers), "ds_config", lambda root, _: configured_stage(root))
    experts, experts_source = _first(models, "num_experts", lambda root, _: _expert_counts(root))
    version, _ = _first(tag.sources, "ds_version", lambda root, _: version_of(root))
    steps = [(s.file.name, step) for s in models if type(step := s.root.get("global_steps")) is int]
    return GridFacts(
        dp=dp or max(named["dp"], 1),
        tp=tp or (max(named["tp"], 1) if is_pipeline else mp),
        mp=mp,
        dp_source=dp_source,
        mp_source=mp_source,
        stage=stage or 0,
        experts=experts or (),
        experts_source=experts_source,
        sharded_model=stage == 3 or any("dp" in file.numbers for file in tag.files.files if file.kind == "model"),
        writer=f"DeepSpeed {version or ''}".strip(),
        claims=tuple(StepClaim(f"{file}: global_steps", step) for file, step in steps[:1]),
    )


def _first(
    sources: Iterable[Source], entry: str, read: Callable[[dict[Any, Any], dict[Any, Any]], Any]
) -> tuple[Any, str]:
    """(first value that `read` finds in a file, its entry and file); (None, "") without one."""
    values = ((read(source.root, source.state), f"{entry} of {source.file.name}") for source in sources)
    return next((item for item in values if item[0]), (None, ""))


def _tp_degree(root: dict[Any, Any], mp: int) -> int:
    degree = count_of(dict_of(root.get("checkpoint_parallel_dimensions")).get("tp_degree"))
    return degree if degree and not mp % degree else 0


def _expert_counts(root: dict[Any, Any]) -> tuple[int, ...]:
    counts = root.get("num_experts")
    return tuple(counts) if isinstance(counts, (list, tuple)) and all(map(count_of, counts)) else ()


def trainer_claim(folder: Folder) -> tuple[StepClaim, ...]:
    """The step of transformers' Trainer, which lets the engine name the folder beside its own state.

    The engine takes a step for each full accumulation; the Trainer also counts the last, shorter one of each epoch. So
    the engine may be behind by one step for each epoch that was begun, and one for the accumulation that is open.
    () where it differs from the name of the Trainer's own folder, since that is reported there.

    Source: transformers.trainer.Trainer._save_optimizer_and_scheduler (5.23): `save_checkpoint` without a tag;
    deepspeed.DeepSpeedEngine.is_gradient_accumulation_boundary (0.19); DeepSpeed#7405
    """
    above = folder.parent
    if above is None or not re.fullmatch(r"global_step\d{1,18}", folder.name) or not above.has(_TRAINER):
        return ()
    try:
        state = read_json(above, _TRAINER, _TRAINER_LIMIT)[0]
    except CkptlintError:
        return ()
    step, epoch = state.get("global_step"), state.get("epoch")
    is_reported = above.name.startswith("checkpoint-") and above.name != f"checkpoint-{step}"
    if type(step) is not int or is_reported:
        return ()
    behind = math.ceil(epoch) + 1 if isinstance(epoch, (int, float)) and 0 <= epoch < step else step
    return (StepClaim(f"../{_TRAINER}", step, behind),)


_TRAINER = "trainer_state.json"
_TRAINER_LIMIT = 64 * 1024**2


_FILES_LIMIT = 2**18


def expected(tag: Tag, grid_facts: GridFacts) -> dict[str, tuple[RankFile, ...]]:
    """Source of the grid -> the files that it must have; raises LimitError for more files than any job has."""
    sources = {
        "optimizer": grid_facts.dp_source,
        "model": grid_facts.dp_source if grid_facts.sharded_model else grid_facts.mp_source,
        "expert": grid_facts.experts_source,
        "layer": "the parameters that param_shapes lists" if any(tag.of("model")) else "",
    }
    files_by_source: dict[str, list[RankFile]] = defaultdict(list)
    for number, file in enumerate(_expected(tag, grid_facts)):
        if number == _FILES_LIMIT:
            raise LimitError(f"numbers more ranks, layers and experts than {_FILES_LIMIT:,}, the limit")
        files_by_source[sources.get(file.kind) or "their numbers"].append(file)
    return {grid: tuple(files) for grid, files in files_by_source.items()}


def _grid(kind: str, name: str, **axes: Iterable[int]) -> Iterator[RankFile]:
    """A file for each combination of numbers, formatted by `name`; lazily, since the sizes may be absurd."""

    def numbered(known: dict[str, int]) -> Iterator[RankFile]:
        if len(known) == len(axes):
            yield RankFile(name.format(**known), kind, known)
            return
        axis = [*axes][len(known)]
        for number in axes[axis]:
            yield from numbered({**known, axis: number})

    return numbered({})


def _expected(tag: Tag, grid_facts: GridFacts) -> Iterator[RankFile]:
    optimizers = [file for file in tag.files.files if file.kind == "optimizer"]
    prefix = optimizers[0].name.partition("zero_pp_rank")[0] if optimizers else ""
    dp = range(grid_facts.dp)
    for mp in range(grid_facts.mp):
        if grid_facts.sharded_model:
            yield from _grid("model", "zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt", dp=dp, mp=(mp,))
        else:
            yield from _grid("model", "mp_rank_{mp:02d}_model_states.pt", mp=(mp,))
    for mp in range(grid_facts.mp) if optimizers or grid_facts.stage else ():
        yield from _grid("optimizer", prefix + "zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt", dp=dp, mp=(mp,))
    yield from _layers(tag)
    yield from _expert_files(tag, grid_facts)


def _layers(tag: Tag) -> Iterator[RankFile]:
    """The files of layers with parameters in `param_shapes`; activations have neither parameters nor a file."""
    files = [file for file in tag.files.files if file.kind == "layer"]
    if not files and not any(source.root.get("module", ...) is None for source in tag.of("model")):
        return
    names = [fqn for source in tag.of("model") for group in shapes_of(source.root) or () for fqn in group]
    numbers = {int(match[1]) for name in names if (match := re.match(r"(\d{1,6})\.", name))}
    layers = sorted(numbers | {file.numbers["layer"] for file in files})
    if ranks := sorted({file.numbers["tp"] for file in files if "tp" in file.numbers}):
        yield from _grid("layer", "layer_{layer:02d}-model_{tp:02d}-model_states.pt", layer=layers, tp=ranks)
    else:
        yield from _grid("layer", "layer_{layer:02d}-model_states.pt", layer=layers)


def _expert_files(tag: Tag, grid_facts: GridFacts) -> Iterator[RankFile]:
    """The files of experts that a tag must have, by the numbers of layers and experts."""
    counts = dict(enumerate(grid_facts.experts))
    named: dict[int, int] = defaultdict(int)
    for file in tag.files.files:
        if file.kind == "expert":
            layer, expert = file.numbers["layer"], file.numbers["expert"]
            named[layer] = max(named[layer], expert + 1)
    # Under a pipeline num_experts lists the layers of one stage only, so more layers in the names win.
    for layer, count in (counts if named.keys() <= counts.keys() else named).items():
        name, tp = "layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt", range(grid_facts.tp)
        yield from _grid("expert", name, layer=(layer,), expert=range(count), mp=tp)
    optimizers = [file.numbers for file in tag.files.files if file.kind == "expert optimizer"]
    roots = (dict_of(source.root.get("optimizer")) for source in tag.of("expert optimizer"))
    names = (str(dict_of(group).get("name", "")) for root in roots for group in root.get("param_groups") or ())
    stated = (int(match[1]) for name in names if (match := re.fullmatch(r"ep_size_(\d{1,6})", name)))
    size = max([0, *(numbers["ep"] + 1 for numbers in optimizers), *stated])
    mps = sorted({numbers["mp"] for numbers in optimizers})
    yield from _grid("expert optimizer", "expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt", ep=range(size), mp=mps)


def note(tag: Tag, grid_facts: GridFacts) -> None:
    """Record statements that must agree between files, and files of ranks outside the grid."""
    things: dict[tuple[str, str], list[tuple[Any, str]]] = defaultdict(list)
    for source in tag.sources:
        file, root, state = source.file, source.root, source.state
        values: dict[tuple[str, str], Any] = {("DeepSpeed version", ""): version_of(root) or None}
        if file.kind == "model":
            counts, shapes = root.get("num_experts"), shapes_of(root)
            for what, key in _COUNTS.items():
                values[what, file.kind] = root[key] if type(root.get(key)) is int else None
            values["experts", ""] = list(counts) if isinstance(counts, (list, tuple)) else None
            if grid_facts.sharded_model and shapes is not None:  # each rank lists those of its model parallel rank
                every = {fqn: shape for group in shapes for fqn, shape in group.items()}
                values["parameters", f"{file.numbers['mp']}"] = sorted(every.items())
        elif file.kind == "optimizer":
            partitions = partition_counts(state)
            values["dtype in the name", ""] = file.name.partition("zero_pp_rank")[0].rstrip("_") or "none"
            values["ZeRO stage", ""] = zero_stage(state)
            same = [*partitions[:1]] if len(set(partitions)) == 1 else [*partitions]
            values["partition count", ""] = same or None
            values["step", file.kind] = ranges(source.steps) or None
        for place, value in values.items():
            if value is not None:
                things[place].append((value, file.name))
    for (what, among), stated in things.items():
        text = _counted_lists() if what == "parameters" else _shown
        tag.statements.note_if_different(what, stated, among=among, by=repr, text=text)
    sizes = (("dp", grid_facts.dp, grid_facts.dp_source), ("mp", grid_facts.mp, grid_facts.mp_source))
    for file in tag.files.files:
        for what, size, source_of in sizes:
            if source_of and file.kind in ("model", "optimizer") and file.numbers.get(what, 0) >= size:
                because, every_rank = f"{source_of} is {size}", f"0-{size - 1}" if size > 1 else "0"
                rank = f"rank {file.numbers[what]}"
                tag.statements.misfits.append(Misfit("", file.name, rank, every_rank, because, "rank"))


_COUNTS = {"data parallel size": "dp_world_size", "model parallel size": "mp_world_size", "step": "global_steps"}
PLACING = ("ZeRO stage", "partition count", "data parallel size", "model parallel size", "parameters")
"""Statements that decide where parts belong; if files contradict each other on them, tensors are not assembled."""


def _shown(value: Any) -> str:
    """A value as printable text; a list with one item as that item."""
    return printable(str(value[0] if isinstance(value, list) and len(value) == 1 else value))


def _counted_lists() -> Callable[[Any], str]:
    """A function that numbers lists that are too long to show."""
    numbers = itertools.count(1)
    return lambda _: f"list {next(numbers)}"
