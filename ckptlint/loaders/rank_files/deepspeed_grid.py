"""What the files of a DeepSpeed tag say of the job: the grid of its ranks, its files, and where they disagree."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptlint.errors import CkptlintError, LimitError
from ckptlint.loaders.rank_files.deepspeed_files import (
    Source,
    Tag,
    configured_stage,
    count_of,
    file_of,
    partition_counts,
    shapes_of,
    zero_stage,
)
from ckptlint.model import AxisSize, Declared, Misfit, RankFile, Said, StepClaim
from ckptlint.model.text import printable, ranges
from ckptlint.storage.folder import Folder

# ---------------------------------------------------------------- what the files say of the whole


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files say of the job.

    Attributes:
        dp, tp, mp: sizes of the grid: data parallel, tensor parallel, and model parallel files (tensor x pipeline).
        dp_source, mp_source: the file and the entry that say so, or "" where names alone tell.
        stage: of ZeRO, None where nothing says.
        experts: experts of each layer of experts.
        sharded_model: whether each data parallel rank has model states of its own (stage 3).
    """

    dp: int
    tp: int
    mp: int
    dp_source: str
    mp_source: str
    stage: int | None
    stage_source: str
    experts: tuple[int, ...]
    experts_source: str
    sharded_model: bool
    writer: str
    claims: tuple[StepClaim, ...]
    declared: dict[str, Declared]
    topology: dict[str, AxisSize]


def facts_of(tag: Tag) -> Facts:
    models, optimizers = list(tag.of("model")), list(tag.of("optimizer"))
    named = {what: 1 + max((f.numbers.get(what, -1) for f in tag.files), default=-1) for what in ("dp", "mp", "tp")}
    dp, dp_source = max(named["dp"], 1), ""
    for source in optimizers:
        if counts := partition_counts(source.state):
            dp, dp_source = max(counts), f"partition_count of {source.file.name}"
            break
    said = next(((source, n) for source in models if (n := count_of(source.root.get("dp_world_size")))), None)
    if not dp_source and said is not None:
        dp, dp_source = said[1], f"dp_world_size of {said[0].file.name}"
    mp, mp_source = max(named["mp"], 1), ""
    if (told := next(((s, n) for s in models if (n := count_of(s.root.get("mp_world_size")))), None)) is not None:
        mp, mp_source = told[1], f"mp_world_size of {told[0].file.name}"
    pipeline = any(file.kind == "layer" for file in tag.files)
    tp = max(named["tp"], 1) if pipeline else mp
    for source in models:
        degrees = source.root.get("checkpoint_parallel_dimensions")
        if isinstance(degrees, dict) and (degree := count_of(degrees.get("tp_degree"))) and not mp % degree:
            tp = degree
            break
    stage, stage_source = _stage(models, optimizers)
    experts, experts_source = _experts(models)
    axes = {"dp": (dp, dp_source), "tp": (tp, mp_source), "pp": (mp // tp if tp else 1, mp_source)}
    return Facts(
        dp=dp,
        tp=tp,
        mp=mp,
        dp_source=dp_source,
        mp_source=mp_source,
        stage=stage,
        stage_source=stage_source,
        experts=experts,
        experts_source=experts_source,
        sharded_model=stage == 3 or any("dp" in file.numbers for file in tag.files if file.kind == "model"),
        writer=_writer(tag),
        claims=_claims(models),
        # deepspeed.moe.experts.Experts copies the one expert that it is given
        declared={"moe_upcycled": Declared(True, "num_experts")} if experts else {},
        topology={axis: AxisSize(size, "metadata") for axis, (size, source) in axes.items() if source},
    )


def _stage(models: list[Source], optimizers: list[Source]) -> tuple[int | None, str]:
    for source in optimizers:
        if (stage := zero_stage(source.state)) is not None:
            return stage, source.file.name
    for source in (*models, *optimizers):
        if (stage := configured_stage(source.root)) is not None:
            return stage, f"ds_config of {source.file.name}"
    return None, ""


def _experts(models: list[Source]) -> tuple[tuple[int, ...], str]:
    for source in models:
        counts = source.root.get("num_experts")
        if isinstance(counts, (list, tuple)) and counts and all(map(count_of, counts)):
            return tuple(counts), f"num_experts of {source.file.name}"
    return (), ""


def _writer(tag: Tag) -> str:
    versions = (source.root.get("ds_version") for source in tag.sources)
    said = next((version for version in versions if isinstance(version, str)), None)
    return "DeepSpeed" if said is None else f"DeepSpeed {printable(said[:32])}"


def _claims(models: list[Source]) -> tuple[StepClaim, ...]:
    for source in models:
        steps = source.root.get("global_steps")
        if type(steps) is int:
            return (StepClaim(f"{source.file.name}: global_steps", steps),)
    return ()


def trainer_claim(folder: Folder) -> tuple[StepClaim, ...]:
    """The step of transformers' Trainer, which lets the engine name the folder beside its own state.

    Nothing where it is not that of the Trainer's own folder, which is told there.

    Source:
        transformers.trainer.Trainer._save_optimizer_and_scheduler (5.23): `save_checkpoint` without a tag
    """
    above = folder.parent
    if above is None or not re.fullmatch(r"global_step\d{1,18}", folder.name) or not above.has(_TRAINER):
        return ()
    try:
        document = json.loads(above.read(_TRAINER, _TRAINER_LIMIT))
    except (CkptlintError, ValueError, RecursionError):
        return ()
    step = document.get("global_step") if isinstance(document, dict) else None
    is_told = above.name.startswith("checkpoint-") and above.name != f"checkpoint-{step}"
    return (StepClaim(f"../{_TRAINER}", step),) if type(step) is int and not is_told else ()


_TRAINER = "trainer_state.json"
_TRAINER_LIMIT = 64 * 1024**2


# ---------------------------------------------------------------- the grid


def lost_files(tag: Tag, facts: Facts) -> tuple[tuple[RankFile, ...], str]:
    """The files that the grid has and the folder has not, and what the grid is from.

    Raises:
        LimitError: the files say that there are more than any job has.
    """
    there = {(file.kind, *sorted(file.numbers.items())) for file in tag.files}
    lost = []
    for number, file in enumerate(_expected(tag, facts)):
        if number == _FILES_LIMIT:
            raise LimitError(f"counts more files of ranks, layers and experts than {_FILES_LIMIT:,}, the limit")
        if (file.kind, *sorted(file.numbers.items())) not in there:
            lost.append(file)
    sources = {
        "optimizer": facts.dp_source,
        "model": facts.dp_source if facts.sharded_model else facts.mp_source,
        "expert": facts.experts_source,
        "layer": "the parameters that param_shapes lists" if any(tag.of("model")) else "their numbers",
    }
    known = dict.fromkeys(sources.get(file.kind, "") or "their numbers" for file in lost)
    return tuple(lost), ", ".join(known)


def _expected(tag: Tag, facts: Facts) -> Iterator[RankFile]:
    for mp in range(facts.mp):
        if facts.sharded_model:
            for dp in range(facts.dp):
                name = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
                yield RankFile(name, "model", {"dp": dp, "mp": mp})
        else:
            yield RankFile(f"mp_rank_{mp:02d}_model_states.pt", "model", {"mp": mp})
    optimizers = [file for file in tag.files if file.kind == "optimizer"]
    if optimizers or facts.stage:
        prefix = optimizers[0].name.partition("zero_pp_rank")[0] if optimizers else ""
        for mp in range(facts.mp):
            for dp in range(facts.dp):
                name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
                yield RankFile(name, "optimizer", {"dp": dp, "mp": mp})
    yield from _layers(tag)
    yield from _expert_files(tag, facts)


def _layers(tag: Tag) -> Iterator[RankFile]:
    """The files of the layers whose parameters `param_shapes` lists; an activation has none, and no file."""
    files = [file for file in tag.files if file.kind == "layer"]
    names = [str(fqn) for source in tag.of("model") for group in shapes_of(source.root) or () for fqn in group]
    if not files and not any(source.root.get("module", ...) is None for source in tag.of("model")):
        return
    parts = sorted({file.numbers.get("tp", -1) for file in files}) or [-1]
    numbers = {int(match[1]) for name in names if (match := re.match(r"(\d{1,6})\.", name))}
    for layer in sorted(numbers | {file.numbers["layer"] for file in files}):
        for tp in parts:
            label, own = (f"-model_{tp:02d}", {"tp": tp}) if tp >= 0 else ("", {})
            yield RankFile(f"layer_{layer:02d}{label}-model_states.pt", "layer", {"layer": layer, **own})


def _expert_files(tag: Tag, facts: Facts) -> Iterator[RankFile]:
    files = [file for file in tag.files if file.kind == "expert"]
    found = {file.numbers["layer"] for file in files}
    counts = dict(enumerate(facts.experts))
    if not counts or not found <= counts.keys():
        counts = {}
        for file in files:  # a pipeline counts the layers of a stage
            layer, expert = file.numbers["layer"], file.numbers["expert"]
            counts[layer] = max(counts.get(layer, 0), expert + 1)
    for layer, count in counts.items():
        for expert in range(count):
            for mp in range(facts.tp):
                name = f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"
                yield RankFile(name, "expert", {"layer": layer, "expert": expert, "mp": mp})
    optimizers = [file for file in tag.files if file.kind == "expert optimizer"]
    size = 1 + max((file.numbers["ep"] for file in optimizers), default=-1)
    for source in tag.of("expert optimizer"):
        size = max(size, _expert_parallel(source.root))
    for ep in range(size):
        for mp in sorted({file.numbers["mp"] for file in optimizers}):
            name = f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt"
            yield RankFile(name, "expert optimizer", {"ep": ep, "mp": mp})


def _expert_parallel(root: dict[Any, Any]) -> int:
    """The size in the names that DeepSpeed gives groups of experts, `ep_size_2`."""
    optimizer = root.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    names = [str(group.get("name", "")) for group in groups or () if isinstance(group, dict)]
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"ep_size_(\d{1,6})", name))), default=0)


def surplus(tag: Tag, facts: Facts) -> list[Misfit]:
    """Files of ranks that the grid does not have."""
    found = []
    for file in tag.files:
        for what, size, source in (("dp", facts.dp, facts.dp_source), ("mp", facts.mp, facts.mp_source)):
            if source and file.kind in ("model", "optimizer") and file.numbers.get(what, 0) >= size:
                expected = f"0-{size - 1}" if size > 1 else "0"
                because = f"{source} is {size}"
                found.append(Misfit("", file.name, f"rank {file.numbers[what]}", expected, because, "rank"))
    return found


# ---------------------------------------------------------------- what must be the same

_FILES_LIMIT = 2**18

STRUCTURE = ("ZeRO stage", "partition count", "data parallel size", "model parallel size", "parameters")


def disagreements(tag: Tag, facts: Facts) -> list[Said]:
    """What the files of a tag say differently."""
    said: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source in tag.sources:
        name, root, state = source.file.name, source.root, source.state
        if isinstance(version := root.get("ds_version"), str):
            said["DeepSpeed version"][printable(version[:32])].append(name)
        if source.file.kind == "model":
            for what, key in (
                ("data parallel size", "dp_world_size"),
                ("model parallel size", "mp_world_size"),
                ("step", "global_steps"),
            ):
                if type(root.get(key)) is int:
                    said[what][str(root[key])].append(name)
            if isinstance(root.get("num_experts"), (list, tuple)):
                said["experts"][printable(str(list(root["num_experts"])))].append(name)
        if source.file.kind == "optimizer":
            said["dtype in the name"][source.file.name.partition("zero_pp_rank")[0].rstrip("_") or "none"].append(name)
            if (stage := zero_stage(state)) is not None:
                said["ZeRO stage"][str(stage)].append(name)
            if counts := partition_counts(state):
                said["partition count"][str(list(counts)) if len(set(counts)) > 1 else str(counts[0])].append(name)
    found = [item for what, values in said.items() if len(values) > 1 for item in _disagreement(what, values)]
    return found + list(_other_parameters(tag, facts)) + list(_optimizer_steps(tag))


def _disagreement(what: str, values: dict[str, list[str]]) -> list[Said]:
    return [Said(what, value, file) for value, files in values.items() for file in files]


def _other_parameters(tag: Tag, facts: Facts) -> Iterator[Said]:
    """Where each rank lists the parameters (stage 3): those of one model parallel rank, equal on all of its ranks."""
    if not facts.sharded_model:
        return
    listed: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source in tag.of("model"):
        groups = shapes_of(source.root)
        if groups is not None:
            every = {fqn: shape for group in groups for fqn, shape in group.items()}
            listed[source.file.numbers["mp"]][repr(sorted(every.items()))].append(source.file.name)
    for values in listed.values():
        if len(values) > 1:
            shown = {f"list {i + 1}": files for i, files in enumerate(values.values())}
            yield from _disagreement("parameters", shown)


def _optimizer_steps(tag: Tag) -> Iterator[Said]:
    """The step that the optimizer of each rank counted."""
    steps: dict[str, list[str]] = defaultdict(list)
    for source in tag.of("optimizer"):
        if source.steps:
            steps[ranges(source.steps)].append(source.file.name)
    if len(steps) > 1:
        yield from _disagreement("step", steps)


def other_names(tag: Tag) -> Iterator[tuple[str, str, str]]:
    """The files that were written under another name of DeepSpeed's, which torch.save keeps inside the archive."""
    named = {source.file.name: file_of(f"{source.found.prefix}.pt") for source in tag.sources}
    alike: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for source in tag.sources:
        alike[_checksums(source)].append(source.file.name)
    for source in tag.sources:
        name, inside, own = source.file.name, named[source.file.name], _checksums(source)
        if inside is not None and (inside.kind, inside.numbers) != (source.file.kind, source.file.numbers):
            same = [other for other in alike[own][:2] if other != name and own]
            yield (name, inside.name, same[0] if same else "")


def _checksums(source: Source) -> tuple[tuple[int, int], ...]:
    return tuple((place.size, place.crc) for place in source.found.storages.values() if place.size)
