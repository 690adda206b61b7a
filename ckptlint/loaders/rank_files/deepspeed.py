"""DeepSpeed's folder of a tag: model states, ZeRO partitions, layers of a pipeline and experts in their own files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptlint.loaders.problems import optimizer_never_written
from ckptlint.loaders.rank_files.deepspeed_files import Source, Tag, count_of, dict_of, read_tag, shapes_of
from ckptlint.loaders.rank_files.deepspeed_grid import PLACING, GridFacts, expected, grid_facts_of, note, trainer_claim
from ckptlint.loaders.rank_files.deepspeed_groups import EXPERT, Cut, flat_groups, owner_of
from ckptlint.loaders.readers.torch_files import Columns
from ckptlint.model import Checkpoint, Declared, Misfit, Problem, RankFile
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import first_names, plural, printable, ranges, verb
from ckptlint.storage.folder import Folder


def read_deepspeed(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The checkpoint in the folder of a tag; raises AccessError where a read is refused.

    Source: deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint (0.14 - 0.19)
    """
    tag = read_tag(folder, look_at_files)
    columns, grid_facts = Columns(), grid_facts_of(tag)
    grid = expected(tag, grid_facts)
    odd = [*_weights(tag, grid_facts), *_gates(tag, grid)]
    add_model(columns, tag, grid_facts, {misfit.fqn for misfit in odd})
    first = len(columns.rows)
    cut = flat_groups(tag, grid_facts.tp, columns)
    unnamed = _add_unnamed(columns, tag, {row.file for row in columns.rows[first:]})
    note(tag, grid_facts)
    tag.statements.misfits += odd
    made = assembled(tag, grid_facts, columns, grid, cut)
    return replace(
        made,
        claims=grid_facts.claims + trainer_claim(folder),
        topology=grid_facts.topology,
        not_looked_at=unnamed,
        problems=[*made.problems, *_never_written(tag, grid_facts)],
    )


def assembled(
    tag: Tag, grid_facts: GridFacts, columns: Columns, grid: Mapping[str, Sequence[RankFile]], cut: Cut | None = None
) -> Checkpoint:
    """The checkpoint of a tag: from where the grid is -> its files, and the flat groups, None in the universal form."""
    files = tag.statements.of(tag.files.files, grid)
    lost = sum(map(len, files.missing.values()))
    partial = ""
    if missing := lost + sum(not file.is_read or file.same_as != "" for file in files.files):
        partial = f"{missing} of {lost + len(files.files)} files of this save {verb(missing, 'is')} missing or unread"
    elif files.misfits or any(item.what in PLACING for item in files.statements) or (cut and cut.unplaced):
        partial = "the files of this save contradict each other"
    readable = any(file.is_read for file in files.files)
    problems = tag.files.problems
    return tag.files.checkpoint(
        columns,
        files if cut is None else replace(files, flat_groups=tuple(cut.groups)),
        format="deepspeed",
        writer=grid_facts.writer,
        # deepspeed.moe.experts.Experts starts with copies of one expert
        declared={"moe_upcycled": Declared(True, "num_experts")} if grid_facts.experts else {},
        claims=grid_facts.claims,
        problems=problems if readable else [replace(problem, blocks=True) for problem in problems],
        readable=readable,
        partial_because=partial,
        metadata_file=files.files[0].name,
    )


def _never_written(tag: Tag, grid_facts: GridFacts) -> Iterator[Problem]:
    """That the engine stepped and no file has its optimizer; of files of optimizers that are lost the grid tells.

    Source: deepspeed.DeepSpeedEngine._save_checkpoint (0.19): `optimizer` of the model states, None where each rank
    writes a file of its own; DeepSpeed#7786
    """
    stepped = (source for source in tag.of("model") if count_of(source.root.get("global_steps")))
    lacking = [s for s in stepped if s.root.get("optimizer", ...) is None and s.root.get("lr_scheduler")]
    is_told = any("optimizer" in file.kind for file in tag.files.files) or grid_facts.stage > 0  # by RNK001
    if lacking and not is_told and len(lacking) == sum(1 for _ in tag.of("model")):
        file, steps = lacking[0].file.name, lacking[0].root["global_steps"]
        others = f" (as in {plural(len(lacking) - 1, 'other file')})" if len(lacking) > 1 else ""
        lack = f"optimizer in {file} is None{others} and no *_optim_states.pt is there"
        yield optimizer_never_written(file, steps, lack)


def _weights(tag: Tag, grid_facts: GridFacts) -> Iterator[Misfit]:
    """Parameters that the model's files list, and do not hold, or hold in another shape; one misfit for each file."""
    layers = {(source.file.numbers["layer"], source.file.numbers.get("tp", 0)): source for source in tag.of("layer")}
    for source in tag.of("model"):
        module, odd_by_file = source.root.get("module"), dict[str, list[tuple[str, Any, tuple[int, ...]]]]()
        for fqn, shape in ((fqn, shape) for group in shapes_of(source.root) or () for fqn, shape in group.items()):
            state, file, key = module, source.file.name, fqn
            match = re.fullmatch(r"(\d{1,6})\.(.+)", fqn) if state is None else None
            layer = layers.get((int(match[1]), source.file.numbers["mp"] % grid_facts.tp)) if match else None
            if match and layer is not None:
                state, file, key = layer.root, layer.file.name, match[2]
            if not isinstance(state, dict) or EXPERT.fullmatch(fqn):
                continue
            tensor = state.get(key)
            is_empty = grid_facts.sharded_model and isinstance(tensor, StoredTensor) and 0 in tensor.shape
            if not is_empty and (not isinstance(tensor, StoredTensor) or tensor.shape != shape):
                odd_by_file.setdefault(file, []).append((fqn, tensor, shape))
        for file, odd in odd_by_file.items():
            fqn, tensor, shape = odd[0]
            stored = f"shape {list(tensor.shape)}" if isinstance(tensor, StoredTensor) else "no values"
            because = f"{source.file.name} lists it" + (f", and {len(odd) - 1:,} more like it" if odd[1:] else "")
            yield Misfit(printable(fqn), file, stored, f"shape {list(shape)}", because, "weight")


def _gates(tag: Tag, grid: Mapping[str, Sequence[RankFile]]) -> Iterator[Misfit]:
    """Gates of experts that have another number of rows than there are experts.

    Source: deepspeed.moe.sharded_moe.TopKGate: `wg` is a linear layer from the model's width to the experts
    """
    layers = {
        f"{match[1].removesuffix('experts.deepspeed_experts.')}gate.wg.weight": source.file.numbers["layer"]
        for source in tag.of("expert")
        for fqn in source.root
        if (match := EXPERT.fullmatch(str(fqn)))
    }
    experts: dict[int, set[int]] = defaultdict(set)
    for numbers in (file.numbers for files in grid.values() for file in files if file.kind == "expert"):
        experts[numbers["layer"]].add(numbers["expert"])
    for source in tag.of("model"):
        for fqn, layer in layers.items():
            gate, number = dict_of(source.root.get("module")).get(fqn), len(experts[layer])
            if isinstance(gate, StoredTensor) and len(gate.shape) == 2 and gate.shape[0] != number:
                because = f"the files of its experts are those of {ranges(experts[layer])}"
                yield Misfit(printable(fqn), source.label, f"{gate.shape[0]} rows", f"{number}", because, "weight")


def add_model(columns: Columns, tag: Tag, grid_facts: GridFacts, odd: Collection[str] = ()) -> None:
    """Add weights and buffers from the model's files, but for `odd` keys, which are reported as misfits.

    Those that ZeRO-3 removed come from the groups.
    """
    names: set[str] = set()
    for source in tag.of("model"):
        aliases = dict_of(source.root.get("shared_params"))
        owner = owner_of(source.file.numbers["mp"], grid_facts.tp)
        for fqn, tensor in _tensors(source.root.get("module")):
            if fqn in aliases or fqn in odd or (grid_facts.sharded_model and 0 in tensor.shape):
                continue
            _add(columns, names, f"{owner}{fqn}", tensor, source)
        for fqn, tensor in _tensors(source.root.get("optimizer")):
            _add(columns, names, f"optimizer.{source.file.name.removesuffix('_model_states.pt')}.{fqn}", tensor, source)
    for source in tag.of("layer"):
        owner = owner_of(source.file.numbers.get("tp", 0), grid_facts.tp)
        for fqn, tensor in _tensors(source.root):
            if (named := f"{source.file.numbers['layer']}.{fqn}") not in odd:
                _add(columns, names, f"{owner}{named}", tensor, source)
    for source in tag.of("expert"):
        owner = owner_of(source.file.numbers["mp"], grid_facts.tp)
        for fqn, tensor in _tensors(source.root):
            _add(columns, names, f"{owner}{fqn}", tensor, source)
    for source in tag.of("expert optimizer"):
        stem = source.file.name.removesuffix("_optim_states.pt")
        for fqn, tensor in _tensors(source.root.get("optimizer")):
            _add(columns, names, f"optimizer.{stem}.{fqn}", tensor, source)


def _add_unnamed(columns: Columns, tag: Tag, placed: Collection[int]) -> tuple[str, ...]:
    """Add tensors of optimizer files without a known group (< 0.7), by their keys; returns notes on unknown forms."""
    odd = [source for source in tag.of("optimizer") if source.number not in placed]
    for source in odd:
        for fqn, tensor in _tensors(source.state):
            name = f"optimizer.{source.file.name.removesuffix('_optim_states.pt')}.{fqn}"
            columns.add(name, tensor, source.number, source.torch_file)
    strange = [source.file.name for source in odd if not source.state.keys() & _FLAT]
    what = "ckptlint does not know this form of optimizer state and did not compare it with the model"
    return (f"{first_names(strange)}: {what}",) if strange else ()


_FLAT = {"single_partition_of_fp32_groups", "fp32_flat_groups"}


def _add(columns: Columns, names: set[str], fqn: str, tensor: StoredTensor, source: Source) -> None:
    """A whole tensor, or another copy of one that was added before."""
    columns.add(fqn, tensor, source.number, source.torch_file, offsets=None if fqn in names else ())
    names.add(fqn)


def _tensors(value: Any, prefix: str = "", levels: int = 4) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in dicts and lists by their keys."""
    items: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, (list, tuple)) else dict_of(value).items()
    for key, item in items:
        if isinstance(item, StoredTensor):
            yield f"{prefix}{key}", item
        elif levels and isinstance(item, (dict, list, tuple)):
            yield from _tensors(item, f"{prefix}{key}.", levels - 1)
