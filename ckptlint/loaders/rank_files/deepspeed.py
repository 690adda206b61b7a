"""DeepSpeed's folder of a tag: model states, ZeRO partitions, layers of a pipeline and experts in their own files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ckptlint.loaders.rank_files.deepspeed_files import Source, Tag, read_tag, shapes_of
from ckptlint.loaders.rank_files.deepspeed_grid import (
    STRUCTURE,
    Facts,
    disagreements,
    facts_of,
    lost_files,
    other_names,
    surplus,
    trainer_claim,
)
from ckptlint.loaders.rank_files.deepspeed_groups import EXPERT, flat_groups, owner_of
from ckptlint.loaders.rank_files.onto import Columns, Part
from ckptlint.model import Checkpoint, FileTable, Misfit, RankFile, RankFileSet
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable, ranges, some
from ckptlint.storage.folder import Folder


def read_deepspeed(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The checkpoint in the folder of a tag.

    Raises:
        AccessError: the operating system refused a read.

    Source:
        deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint (0.14 - 0.19)
    """
    tag = read_tag(folder, look_at_files)
    others = tuple(other_names(tag))
    copies = {name for name, _, same_as in others if same_as}
    tag.sources = [source for source in tag.sources if source.file.name not in copies]
    columns = Columns()
    facts = facts_of(tag)
    groups, parts = flat_groups(tag, facts.tp)
    lost, grid = lost_files(tag, facts)
    odd = [*_weights(tag, facts), *_gates(tag, lost)]
    add_model(columns, tag, facts, {misfit.fqn for misfit in odd})
    columns.parts += parts
    unnamed = _add_unnamed(columns, tag, {part.file for part in parts})
    told = disagreements(tag, facts)
    misfits = surplus(tag, facts) + odd
    unread = [file.name for file in tag.files if not file.is_read]
    partial = ""
    if missing := len(unread) + len(lost) + len(copies):
        partial = f"{missing} of {len(tag.files) + len(lost)} files of this save are missing or unread"
    elif misfits or any(item.what in STRUCTURE for item in told):
        partial = "the files of this save contradict each other"
    tensors, records, storages = columns.made()
    blocks = not tag.sources
    return Checkpoint(
        path=folder.display,
        format="deepspeed",
        writer=facts.writer,
        tensors=tensors,
        records=records,
        storages=storages,
        files=FileTable.of(tag.stored),
        declared=facts.declared,
        claims=facts.claims + trainer_claim(folder),
        topology=facts.topology,
        problems=[replace(problem, blocks=True) for problem in tag.problems] if blocks else tag.problems,
        readable=not blocks,
        partial=partial,
        metadata_file=tag.files[0].name,
        unseen=unnamed,
        rank_files=RankFileSet(
            files=tuple(named(tag.files, others)),
            expected={grid: (*tag.files, *lost)},
            said=tuple(told),
            misfits=tuple(misfits),
            flat_groups=tuple(groups),
        ),
    )


def named(files: Iterable[RankFile], others: Iterable[tuple[str, str, str]]) -> Iterator[RankFile]:
    """The files, each with the other name that its content says."""
    known = {name: (inside, same_as) for name, inside, same_as in others}
    for file in files:
        inside, same_as = known.get(file.name, ("", ""))
        yield replace(file, inside=inside, same_as=same_as)


# ---------------------------------------------------------------- against the parameters that are listed


def _weights(tag: Tag, facts: Facts) -> Iterator[Misfit]:
    """Parameters that the model's files list, and do not hold, or hold in another shape; one misfit for each file."""
    layers = {(source.file.numbers["layer"], source.file.numbers.get("tp", 0)): source for source in tag.of("layer")}
    for source in tag.of("model"):
        module, found = source.root.get("module"), dict[str, list[tuple[str, Any, tuple[int, ...]]]]()
        for fqn, shape in ((fqn, shape) for group in shapes_of(source.root) or () for fqn, shape in group.items()):
            held, file, key = module, source.file.name, fqn
            match = re.fullmatch(r"(\d{1,6})\.(.+)", fqn) if held is None else None
            layer = layers.get((int(match[1]), source.file.numbers["mp"] % facts.tp)) if match else None
            if match and layer is not None:
                held, file, key = layer.root, layer.file.name, match[2]
            if not isinstance(held, dict) or EXPERT.fullmatch(fqn):
                continue
            tensor = held.get(key)
            is_empty = facts.sharded_model and isinstance(tensor, StoredTensor) and 0 in tensor.shape
            if not is_empty and (not isinstance(tensor, StoredTensor) or tensor.shape != shape):
                found.setdefault(file, []).append((fqn, tensor, shape))
        for file, odd in found.items():
            fqn, tensor, shape = odd[0]
            stored = f"shape {list(tensor.shape)}" if isinstance(tensor, StoredTensor) else "nothing"
            because = f"{source.file.name} lists it" + (f", and {len(odd) - 1:,} more like it" if odd[1:] else "")
            yield Misfit(printable(fqn), file, stored, f"shape {list(shape)}", because, "weight")


def _gates(tag: Tag, lost: tuple[RankFile, ...]) -> Iterator[Misfit]:
    """Gates of experts that have another number of rows than there are experts.

    Source:
        deepspeed.moe.sharded_moe.TopKGate: `wg` is a linear layer from the model's width to the experts
    """
    experts: dict[str, set[int]] = defaultdict(set)
    for source in tag.of("expert"):
        for fqn in source.root:
            if match := EXPERT.fullmatch(str(fqn)):
                experts[match[1].removesuffix("experts.deepspeed_experts.")].add(int(match[2]))
    if any(file.kind == "expert" for file in lost):
        return
    for source in tag.of("model"):
        module = source.root.get("module")
        weights: dict[Any, Any] = module if isinstance(module, dict) else {}
        for start, numbers in experts.items():
            gate = weights.get(f"{start}gate.wg.weight")
            if isinstance(gate, StoredTensor) and len(gate.shape) == 2 and gate.shape[0] != len(numbers):
                because = f"the files of its experts are those of {ranges(numbers)}"
                fqn = printable(f"{start}gate.wg.weight")
                yield Misfit(fqn, source.file.name, f"{gate.shape[0]} rows", f"{len(numbers)}", because, "weight")


# ---------------------------------------------------------------- the weights


def add_model(columns: Columns, tag: Tag, facts: Facts, odd: Collection[str] = ()) -> None:
    """The weights and buffers as the model's files hold them; what ZeRO-3 took out of them comes from the groups.

    Args:
        odd: those that are told as misfits.
    """
    held: set[str] = set()
    for source in tag.of("model"):
        module = source.root.get("module")
        shared = source.root.get("shared_params")
        aliases = shared if isinstance(shared, dict) else {}
        owner = owner_of(source.file.numbers["mp"], facts.tp)
        for fqn, tensor in _tensors(module if isinstance(module, dict) else {}):
            if fqn in aliases or fqn in odd or (facts.sharded_model and 0 in tensor.shape):
                continue
            _add(columns, held, f"{owner}{fqn}", tensor, source)
        for fqn, tensor in _tensors(source.root.get("optimizer")):
            _add(columns, held, f"optimizer.{source.file.name.removesuffix('_model_states.pt')}.{fqn}", tensor, source)
    for source in tag.of("layer"):
        owner = owner_of(source.file.numbers.get("tp", 0), facts.tp)
        for fqn, tensor in _tensors(source.root):
            if (named := f"{source.file.numbers['layer']}.{fqn}") not in odd:
                _add(columns, held, f"{owner}{named}", tensor, source)
    for source in tag.of("expert"):
        owner = owner_of(source.file.numbers["mp"], facts.tp)
        for fqn, tensor in _tensors(source.root):
            _add(columns, held, f"{owner}{fqn}", tensor, source)
    for source in tag.of("expert optimizer"):
        for fqn, tensor in _tensors(source.root.get("optimizer")):
            _add(columns, held, f"optimizer.{source.file.name.removesuffix('_optim_states.pt')}.{fqn}", tensor, source)


def _add_unnamed(columns: Columns, tag: Tag, placed: Collection[int]) -> tuple[str, ...]:
    """The tensors of optimizer files of which no group could be laid out, by their keys; and what is not judged there.

    Versions before 0.7 do not say which parameter lies where.
    """
    odd = [source for source in tag.of("optimizer") if source.number not in placed]
    for source in odd:
        for fqn, tensor in _tensors(source.state):
            name = f"optimizer.{source.file.name.removesuffix('_optim_states.pt')}.{fqn}"
            columns.add(name, tensor, source.number, source.found)
    strange = [source.file.name for source in odd if not source.state.keys() & _FLAT]
    if not strange:
        return ()
    return (
        f"{some(strange)}: ckptlint does not know this form of optimizer state and did not compare it with the model",
    )


_FLAT = {"single_partition_of_fp32_groups", "fp32_flat_groups"}


def _add(columns: Columns, held: set[str], fqn: str, tensor: StoredTensor, source: Source) -> None:
    """A whole tensor, or another copy of one that was added before."""
    place = source.found.storages.get(tensor.key)
    offsets = None if fqn in held else (0,) * len(tensor.shape)
    held.add(fqn)
    columns.parts.append(Part(fqn, tensor.dtype, tensor.shape, offsets, tensor, source.number, place))


def _tensors(value: Any, prefix: str = "", levels: int = 4) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in dicts and lists by their keys."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        if isinstance(item, StoredTensor):
            yield f"{prefix}{key}", item
        elif levels and isinstance(item, (dict, list, tuple)):
            yield from _tensors(item, f"{prefix}{key}.", levels - 1)
