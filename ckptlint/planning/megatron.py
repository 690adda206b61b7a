"""Predicts what Megatron-Core refuses, drops or pads when it loads a torch_dist checkpoint into another layout.

The prediction uses only metadata and common state, and repeats the decisions of Megatron-LM's `load_checkpoint` and of
`dist_checkpointing.load`, version by version. `bench/evidence/megatron_loads.py` runs real loads with megatron-core
0.12 to 0.19, and tests compare their outcome with these sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from ckptlint.analysis.fit.trusted_config import flag, number, trusted, trusted_topology
from ckptlint.analysis.optimizer.inventory import dp_group
from ckptlint.analysis.optimizer.records import content_metadata, is_training_state, optimizer_records
from ckptlint.grouping import grouped
from ckptlint.loaders.readers.common_state import COMMON_ENTRY
from ckptlint.model import Checkpoint, ShardedObject
from ckptlint.model.text import plural
from ckptlint.patterns import lazy_pattern
from ckptlint.planning.outcome import Constraint, Effect
from ckptlint.vocabulary.config_fields import attributes
from ckptlint.vocabulary.keys import parse

Version = tuple[int, int]
"""Of megatron-core, without the patch."""

Form = Literal[
    "dp_reshardable", "fully_reshardable", "fully_sharded_model_space", "fully_sharded_bucket_space",
    "dp_zero_gather_scatter", "plain",
]  # fmt: skip
"""Sharding type of the optimizer state; `plain` without a distributed optimizer."""

KNOWN: tuple[Version, ...] = tuple((0, minor) for minor in range(11, 20))
"""Versions of megatron-core whose decisions were read."""

_FREE: frozenset[str] = frozenset({"fully_reshardable", "fully_sharded_model_space", "plain"})
"""Forms with one key per weight, so that tp and pp may change."""

_WRITTEN: Mapping[str, tuple[Version, Version]] = {
    "dp_reshardable": ((0, 15), (0, 19)),
    "fully_reshardable": ((0, 15), (0, 19)),
    "fully_sharded_model_space": ((0, 6), (0, 14)),
    "fully_sharded_bucket_space": ((0, 6), (0, 14)),
}
"""Form -> first and last version that writes and reads it."""

MEGATRON_AXES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
"""The axes of a layout, as `--to` names them."""

_LOAD = "megatron.training.checkpointing.load_checkpoint"
_MEGATRON_LM = f"Megatron-LM core_v0.12.3-core_v0.19.0, {_LOAD}"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__"

_UNEVEN = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
)  # fmt: skip
"""Arguments that give pipeline stages different numbers of layers."""

_BUCKET_KEY = lazy_pattern(r"(.*)\.bucket_idx_\d+\.(\w+)")
_BUCKET = 40_000_000  # elements of a bucket
_BUCKET_PER_RANK = 1_000_000  # more elements for each data-parallel rank


@dataclass(frozen=True, slots=True)
class _Change:
    """A checkpoint, its layout, and the layout of the job that loads it.

    Attributes:
        old: axis -> size in the job that saved, where known.
        new: axis -> size in the job that loads, for tp, pp, vpp, ep, etp, cp, dp.
        give_up: state that the job does not load: `optim`, `rng`.
        readers: versions of megatron-core that may load it.
        layout_is_declared: whether the saved arguments state tp or pp, which Megatron-LM compares.
    """

    ckpt: Checkpoint
    old: Mapping[str, int]
    new: Mapping[str, int]
    give_up: frozenset[str]
    readers: tuple[Version, ...]
    layout_is_declared: bool

    def changes(self, *axes: str) -> list[str]:
        """The axes whose known size changes, as `tp 2 to 1`."""
        return [
            f"{axis} {self.old[axis]} to {self.new[axis]}"
            for axis in axes
            if axis in self.old and self.old[axis] != self.new[axis]
        ]

    def number(self, name: str) -> int | None:
        """A declared size of the model."""
        return number(trusted(self.ckpt), name)

    def argument(self, name: str) -> object:
        """An argument of the job that saved; None without it."""
        return attributes(self.ckpt.common_value("args")).get(name)


def constraints(
    ckpt: Checkpoint, to: Mapping[str, int], give_up: frozenset[str] = frozenset(), reader: Version | None = None
) -> list[Constraint]:
    """The obstacles to a load into another layout, worst first; a single note without any.

    Args:
        ckpt: a checkpoint of format torch_dist.
        to: axis (tp, pp, vpp, ep, etp, cp, dp) -> size in the job that loads; 1 where none is given, and that of tp
            for etp, as in Megatron-LM.
        give_up: `optim` for --no-load-optim, `rng` for --no-load-rng; what is given up is a note, no loss.
        reader: the version of megatron-core that loads. Without one a constraint counts where every version from
            those that wrote the checkpoint to the newest known has it, and is a note where only some have.

    Source: megatron-core 0.11 to 0.19 (`dist_checkpointing`, `optimizer`), Megatron-LM core_v0.12.3 to core_v0.19.0
    (`megatron.training.checkpointing`)
    """
    change = _change(ckpt, to, give_up, reader)
    collected = [
        *_common_state(change),
        *_layout(change),
        *_model(change),
        *_training_state(change),
        *_vocabulary(change),
        *_not_judged(change),
    ]
    if any(constraint.effect == "drops" for constraint in collected):
        keys = tuple(key for constraint in collected if constraint.effect == "drops" for key in constraint.keys)
        sentence = "a load with --dist-ckpt-strictness raise_all stops where keys are left out"
        collected.append(Constraint("note", sentence, keys, "megatron-core 0.12-0.19, dist_checkpointing.validation"))
    if all(constraint.effect == "note" for constraint in collected):
        shown = ", ".join(f"{axis} {change.new[axis]}" for axis in MEGATRON_AXES if axis in to or axis in ("tp", "pp"))
        besides = "besides that, " if collected else ""
        collected.append(Constraint("note", f"{besides}nothing that Megatron-Core checks prevents a load into {shown}"))
    order: tuple[Effect, ...] = ("fails", "drops", "note")
    return sorted(collected, key=lambda constraint: order.index(constraint.effect))


def _change(ckpt: Checkpoint, to: Mapping[str, int], give_up: frozenset[str], reader: Version | None) -> _Change:
    new = {axis: to.get(axis) or 1 for axis in ("tp", "pp", "vpp", "ep", "cp", "dp")}
    new["etp"] = to.get("etp") or new["tp"]
    old = {axis: size.size for axis, size in trusted_topology(ckpt).items() if axis in new}
    declared = trusted(ckpt)
    layout_is_declared = "tp" in declared or "pp" in declared
    if layout_is_declared:
        old = {"vpp": 1, "cp": 1, "ep": 1, "etp": old.get("tp", 1)} | old
    elif is_training_state(ckpt):  # versions from 0.16 on assume tp 1 and pp 1 whatever the shards say; older ones stop
        old |= {"tp": 1, "pp": 1}
    readers = (reader,) if reader is not None else tuple(v for v in KNOWN if v >= _oldest_writer(ckpt))
    return _Change(ckpt, old, new, give_up, readers, layout_is_declared)


def _oldest_writer(ckpt: Checkpoint) -> Version:
    """The oldest version of megatron-core that can have written this checkpoint, by the traces that it leaves.

    Source: `common_state` 0.19, plans without `mcore_data` 0.16, `chained_optim_avoid_prefix` 0.14, content metadata
    0.13
    """
    content = content_metadata(ckpt)
    form = form_of(ckpt)
    # The checkpoint does not store its version. Each trace gives a lower bound, and the highest
    # bound holds, so at worst too many versions are considered.
    since = [_WRITTEN[form][0]] if form is not None and form in _WRITTEN else []
    since += [(0, 19)] * ("0.19" in ckpt.writer) + [(0, 16)] * (">= 0.16" in ckpt.writer)
    since += [(0, 13)] * bool(content) + [(0, 14)] * ("chained_optim_avoid_prefix" in content)
    since += [(0, 16)] * any(len(obj.shape) == 3 for obj in _objects(ckpt, "rng_state"))
    return max(since, default=KNOWN[0])


def _by_version(change: _Change, first: Version, last: Version, constraint: Constraint) -> Iterator[Constraint]:
    """The constraint if all candidate versions lie in `first` to `last`; a note if only some do; else nothing."""
    affected = [version for version in change.readers if first <= version <= last]
    if len(affected) == len(change.readers) and affected:
        yield constraint
    elif affected:
        low, high = (f"0.{version[1]}" for version in (affected[0], affected[-1]))
        which = f"{low} and later" if affected[-1] == KNOWN[-1] else low if low == high else f"{low} to {high}"
        sentence = f"with megatron-core {which}: {constraint.sentence}"
        yield Constraint("note", sentence, constraint.keys, constraint.source, constraint.guessed)


def _common_state(change: _Change) -> Iterator[Constraint]:
    """Obstacles from the place of the common state, which moved in 0.19."""
    if change.ckpt.common is not None and change.ckpt.common.source == COMMON_ENTRY:
        sentence = "the common state is an entry of .metadata, but this version looks for a file common.pt"
        source = "megatron-core 0.19, dist_checkpointing.serialization.load_common_state_dict"
        yield from _by_version(change, KNOWN[0], (0, 18), Constraint("fails", sentence, (COMMON_ENTRY,), source))


# ---------------------------------------------------------------- the layout and the model


def _layout(change: _Change) -> Iterator[Constraint]:
    """Axis sizes that no job can have."""
    new = change.new
    source = "megatron-core 0.12-0.19, parallel_state.initialize_model_parallel"
    if new["vpp"] > 1 and new["pp"] == 1:
        sentence = f"virtual stages (vpp {new['vpp']}) need more than one pipeline stage"
        yield Constraint("fails", sentence, source=source)
    ranks, cells = new["tp"] * new["cp"] * new["dp"], new["etp"] * new["ep"]
    if ranks % cells:
        sentence = f"a pipeline stage has {plural(ranks, 'rank')}, which cannot hold ep {new['ep']} x etp {new['etp']}"
        yield Constraint("fails", sentence, source=source)


def _model(change: _Change) -> Iterator[Constraint]:
    """Model sizes that the new layout does not divide."""
    new = change.new
    heads, experts = change.number("heads"), change.number("experts")
    groups = change.number("kv_groups") if change.argument("group_query_attention") is not False else None
    tp = new["tp"]
    fails = partial(Constraint, "fails", source=f"megatron-core, {_CONFIG}")
    if heads and heads % tp:
        yield fails(f"{plural(heads, 'attention head', 'does')} not divide by tp {tp}")
    elif groups and groups % tp:
        refused = fails(f"{plural(groups, 'query group', 'does')} not divide by tp {tp}")
        if tp % groups:
            yield refused
        else:  # from 0.16 on ranks may share a group
            yield from _by_version(change, (0, 0), (0, 15), refused)
    ffn, rows = change.number("ffn"), "megatron-core, tensor_parallel.layers.ColumnParallelLinear"
    # With experts in every layer no dense feed-forward layer exists, and its declared size is unused.
    if ffn and ffn % tp and not (experts and change.argument("moe_layer_freq") in (None, 1)):
        and_gate = " and of its gate" if flag(trusted(change.ckpt), "gated") is True else ""
        sentence = f"the {ffn:,} rows of a feed-forward layer{and_gate} do not divide by tp {tp}"
        yield Constraint("fails", sentence, source=rows)
    moe_ffn = change.number("moe_ffn") or ffn
    if experts and moe_ffn and moe_ffn % new["etp"]:
        sentence = f"the {moe_ffn:,} rows of an expert do not divide by etp {new['etp']}"
        yield Constraint("fails", sentence, source=rows)
    if experts and experts % new["ep"]:
        yield fails(f"{plural(experts, 'expert', 'does')} not divide by ep {new['ep']}")
    elif experts is None and new["ep"] > 1 and change.layout_is_declared:
        yield fails(f"the model has no experts for ep {new['ep']}")
    yield from _layers(change)


def _layers(change: _Change) -> Iterator[Constraint]:
    """Source: megatron.core.transformer.transformer_block.get_num_layers_to_build"""
    layers, pp, vpp = change.number("layers"), change.new["pp"], change.new["vpp"]
    declared = trusted(change.ckpt)
    if layers is None or "hybrid_pattern" in declared or "heterogeneous" in declared:
        return
    source = "megatron-core 0.12-0.19, transformer_block.get_num_layers_to_build"
    if any(change.argument(name) for name in _UNEVEN):
        if change.changes("pp", "vpp"):
            sentence = "the job that saved cut its layers unevenly: ckptlint did not judge whether the new cut fits"
            yield Constraint("note", sentence, source=source, guessed=True)
        return
    if layers % pp:
        where = f"pp {pp}"
    elif layers // pp % vpp:
        where = f"pp {pp} with vpp {vpp}"
    else:
        return
    sentence = f"{plural(layers, 'layer', 'does')} not divide by {where}, unless the job names an uneven cut"
    yield Constraint("fails", sentence, source=source, guessed=True)


def _training_state(change: _Change) -> Iterator[Constraint]:
    """Obstacles from optimizer, random and rerun state; a release loads without them."""
    if change.ckpt.path.rpartition("/")[2] == "release":
        sentence = "Megatron-LM loads a release without optimizer and random states, at iteration 0"
        yield Constraint("note", sentence, source=_MEGATRON_LM)
        return
    yield from _optimizer(change)
    yield from _random_states(change)
    yield from _rerun_state(change)


# ---------------------------------------------------------------- the optimizer


def form_of(ckpt: Checkpoint) -> Form | None:
    """The sharding type of the optimizer state; None without optimizer state.

    Source: `distrib_optim_sharding_type` of the content metadata (0.13), `param_state_sharding_type` of the state
    itself (0.6), else the keys: megatron.core.optimizer.distrib_optimizer
    """
    keys = _optimizer_keys(ckpt)
    if not keys:
        return None
    named_forms = [content_metadata(ckpt).get("distrib_optim_sharding_type")]
    named_forms += [record.value for record in optimizer_records(ckpt) if record.kind == "param_state_sharding_type"]
    names: tuple[Form, ...] = get_args(Form)
    for name in names:
        if name in named_forms and name != "plain":
            return name
    # Neither record exists before 0.6. The keys still differ: dp_group_idx names buckets, flattened tensors are cut by
    # elements, and fp32_param is taken for an optimizer that is not distributed.
    groups = {group[2] for key in keys if (group := dp_group(key)) is not None}
    if "param_state" in groups:
        return "dp_zero_gather_scatter"
    is_flat = any(ckpt.tensors[key].is_flattened for key in keys if key in ckpt.tensors)
    if groups:
        return "fully_sharded_bucket_space" if is_flat else "dp_reshardable"
    if is_flat:
        return "fully_sharded_model_space"
    return "plain" if any(".fp32_param." in key for key in keys) else "fully_reshardable"


def _optimizer_keys(ckpt: Checkpoint) -> tuple[str, ...]:
    keys = (*ckpt.tensors, *ckpt.objects.keys)
    return tuple(key for key in keys if "optimizer." in key and parse(key).kind == "optimizer")


def _optimizer(change: _Change) -> Iterator[Constraint]:
    """Whether Megatron-LM loads the optimizer state into the other layout, by its form and version."""
    form = form_of(change.ckpt)
    keys = _optimizer_keys(change.ckpt)
    if "optim" in change.give_up:
        if keys:
            sentence = "the optimizer and the learning rate schedule start anew (--no-load-optim)"
            yield Constraint("note", sentence, keys, _MEGATRON_LM)
        return
    if form is None:
        if change.layout_is_declared:
            sentence = "it holds no optimizer state: Megatron-LM loads it only with --no-load-optim or --finetune"
            yield Constraint("fails", sentence, source=_MEGATRON_LM)
        return
    first, last = _WRITTEN.get(form, (KNOWN[0], KNOWN[-1]))
    unknown = f"the optimizer state is {form}, which exists only since 0.{first[1]}"
    source = f"megatron-core, {_OPTIMIZER}.sharded_state_dict"
    yield from _by_version(change, KNOWN[0], (0, first[1] - 1), Constraint("fails", unknown, keys, source))
    if last < KNOWN[-1]:
        unread = f"the optimizer state is {form}, which these versions no longer read"
        mapping = "dist_checkpointing.mapping.ShardedTensor (flattened_range)"
        source = f"megatron-core 0.15, {mapping} and {_OPTIMIZER}.sharded_state_dict"
        refused = Constraint("fails", unread, keys, source)
        yield from _by_version(change, (0, last[1] + 1), KNOWN[-1], refused)
        if all(version > last for version in change.readers):
            return
    if form in _FREE:
        yield from _chain(change, form, keys)
    else:
        yield from _buffers(change, form, keys)


def _buffers(change: _Change, form: Form, keys: tuple[str, ...]) -> Iterator[Constraint]:
    """Obstacles for forms that store flat buffers of each model-parallel rank: only dp and cp may change."""
    option = "--dist-ckpt-optim-fully-reshardable" if form == "dp_reshardable" else "--ckpt-fully-parallel-save"
    advice = f"save again in the old layout, with {option}"
    if moved := change.changes("tp", "pp"):
        sentence = (
            f"the optimizer state ({form}) loads only into the tp and pp that saved it ({', '.join(moved)}): {advice}"
        )
        yield Constraint("fails", sentence, keys, _MEGATRON_LM)
        return
    if moved := change.changes("vpp", "ep") + (change.changes("etp") if change.number("experts") else []):
        sentence = (
            f"the optimizer state ({form}) is stored as the flat buffers of each model-parallel rank, and these change "
            f"({', '.join(moved)}): {advice}"
        )
        yield Constraint("fails", sentence, keys, f"megatron-core 0.12-0.19, {_OPTIMIZER}")
        return
    if form == "dp_reshardable":
        yield from _bucket_cuts(change)
    elif form == "dp_zero_gather_scatter":
        sentence = "Megatron-LM refuses the optimizer state (dp_zero_gather_scatter) with --ckpt-fully-parallel-load"
        note = Constraint("note", sentence, keys, f"Megatron-LM core_v0.15.3-core_v0.19.0, {_LOAD}")
        yield from _by_version(change, (0, 15), KNOWN[-1], note)


def _bucket_cuts(change: _Change) -> Iterator[Constraint]:
    """Obstacles from bucket boundaries, which move because the bucket size grows with the number of ranks.

    Source: megatron.core.distributed.DistributedDataParallel: max(40M, 1M x ranks) elements where gradients are reduced
    while they are computed, one bucket for the whole buffer elsewhere
    """
    if not change.argument("overlap_grad_reduce") or not {"dp", "cp"} <= change.old.keys():
        return
    named = [name for name in ("ddp_bucket_size", "ddp_num_buckets") if change.argument(name)]
    source = f"megatron-core 0.15-0.19, distributed.DistributedDataParallel and {_OPTIMIZER}"
    if named:
        option = f"--{named[0].replace('_', '-')} {change.argument(named[0])}"
        sentence = f"the optimizer state (dp_reshardable) is stored in buckets: the load stops without {option}"
        yield Constraint("note", sentence, _optimizer_keys(change.ckpt), source)
        return
    sizes = [max(_BUCKET, _BUCKET_PER_RANK * axes["dp"] * axes["cp"]) for axes in (change.old, change.new)]
    if sizes[0] == sizes[1]:
        return
    buffers = grouped((match.groups(), key) for key in change.ckpt.tensors if (match := _BUCKET_KEY.fullmatch(key)))
    # Bucket boundaries follow parameter ends, which are not stored. Only the count shows a move: a buffer over the
    # smaller bucket size that is one bucket now, or has several, will be cut elsewhere. Sizes over 40 ranks were read,
    # not driven.
    moved: list[str] = []
    for keys in buffers.values():
        total = sum(change.ckpt.tensors[key].volume for key in keys)
        if total > min(sizes) and (len(keys) > 1 or total <= sizes[0]):
            moved += keys
    if moved:
        sentence = (
            f"the optimizer state (dp_reshardable) is stored in buckets of {sizes[0]:,} elements, and the new "
            f"number of ranks makes buckets of {sizes[1]:,}: set --ddp-bucket-size {sizes[0]}"
        )
        yield Constraint("fails", sentence, tuple(moved), source, guessed=True)


def _chain(change: _Change, form: Form, keys: tuple[str, ...]) -> Iterator[Constraint]:
    """Obstacles for forms with one key per weight: only the number of chained optimizers must match.

    Source: megatron.core.optimizer.get_megatron_optimizer: the experts have an optimizer of their own where their
    parameters have `allreduce` False (tensor_parallel.layers): with ep over 1, from 0.19 on also with an etp other than
    tp; ChainedOptimizer.load_state_dict
    """
    if not (change.number("experts") or any(".experts." in key for key in change.ckpt.tensors)):
        return
    # Rank 0 describes the chain for all ranks, in the common state. Without its entry, ep above 1 in the saved layout
    # implies two optimizers.
    chain = change.ckpt.common_value("optimizer")
    is_described = isinstance(chain, dict)
    was = sum(isinstance(key, int) for key in chain) > 1 if is_described else change.old.get("ep", 1) > 1
    by_ep = change.new["ep"] > 1
    by_etp = by_ep or change.new["etp"] != change.new["tp"]
    source = "megatron-core 0.12-0.19, optimizer.ChainedOptimizer.load_state_dict"
    known = KNOWN[0], KNOWN[-1]
    refused = [known] if by_ep == by_etp != was else [(KNOWN[0], (0, 18))] if by_ep != was else []
    refused += [((0, 19), KNOWN[-1])] if by_ep != by_etp != was else []
    for first, last in refused:
        here, there = ("two", "one") if was else ("one", "two")
        which = "with ep above 1" if last == (0, 18) or by_ep == by_etp else "with ep above 1 or an etp other than tp"
        sentence = (
            f"the optimizer state ({form}) comes from {here} optimizer{'s' * was}, the job has {there}: "
            f"experts have an optimizer of their own {which}"
        )
        yield from _by_version(change, first, last, Constraint("fails", sentence, keys, source))


# ---------------------------------------------------------------- what ranks keep for themselves


def _objects(ckpt: Checkpoint, key: str) -> list[ShardedObject]:
    grids = (rows for grid_key, _, rows in ckpt.objects.rows_by_grid() if grid_key == key)
    return [ckpt.objects[row] for rows in grids for row in rows.tolist()]


def _random_states(change: _Change) -> Iterator[Constraint]:
    """Obstacles from random states, a grid of objects that cannot be resharded.

    Source: megatron.training.checkpointing.get_rng_state: (PP, TP); in 0.16 (PP, TP, DP x CP) with expert parallelism.
    load_checkpoint: not asked for where tp or pp differ, and 0.13 and earlier then exit without --no-load-rng
    """
    stored = _objects(change.ckpt, "rng_state")
    keys = ("rng_state",) if stored else ()
    if "rng" in change.give_up:
        if stored:
            sentence = "every rank keeps the random states that it was seeded with (--no-load-rng)"
            yield Constraint("note", sentence, keys, _MEGATRON_LM)
        return
    moved = change.changes("tp", "pp")
    if not stored:
        if change.layout_is_declared and not moved and not change.argument("no_save_rng"):
            sentence = "it holds no random states, and Megatron-LM needs them without --no-load-rng"
            yield Constraint("fails", sentence, keys, _MEGATRON_LM)
        return
    new = change.new
    if moved:
        where = ", ".join(moved)
        exits = f"random states do not fit a different layout ({where}): Megatron-LM exits without --no-load-rng"
        yield from _by_version(change, (0, 0), (0, 13), Constraint("fails", exits, keys, _MEGATRON_LM))
        if change.readers[-1] <= (0, 13):
            return
        left = f"random states do not fit a different layout ({where}): every rank keeps those it was seeded with"
        yield Constraint("drops", left, keys, _MEGATRON_LM)
        return
    shape, usual = stored[0].shape, (new["pp"], new["tp"])
    with_experts = (*usual, new["dp"] * new["cp"]) if new["ep"] > 1 else usual
    # 0.16 alone asks for a grid with a data-parallel axis under expert parallelism (driven: "Missing key ...
    # rng_state/shard_0.0.0_1.1.4" in every other version).
    asked = {(KNOWN[0], (0, 15)): usual, ((0, 16), (0, 16)): with_experts, ((0, 17), KNOWN[-1]): usual}
    for (first, last), wanted in asked.items():
        if wanted != shape:
            sentence = (
                f"the random states are a grid of {_grid(shape)}, the job asks for {_grid(wanted)}: the load stops "
                "without --no-load-rng"
            )
            refused = Constraint("fails", sentence, keys, "Megatron-LM core_v0.16.1, get_rng_state")
            yield from _by_version(change, first, last, refused)


def _grid(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _rerun_state(change: _Change) -> Iterator[Constraint]:
    """Obstacles from the rerun state (of steps repeated to find faults), which matters only during a rerun.

    Source: megatron.core.rerun_state_machine.RerunStateMachine.state_dict, one object per rank (0.13)
    """
    stored = _objects(change.ckpt, "rerun_state_machine_state")
    moved = change.changes("tp", "pp", "dp")
    if stored and moved:
        where = ", ".join(moved)
        sentence = f"the rerun state has one part per rank, so Megatron-LM leaves it out ({where}); it holds no weights"
        yield Constraint("note", sentence, ("rerun_state_machine_state",), _MEGATRON_LM)


# ---------------------------------------------------------------- vocabulary, and what is not known


def _vocabulary(change: _Change) -> Iterator[Constraint]:
    """Notes on vocabulary padding, whose number of rows depends on tp.

    Source: megatron.training.vocab_utils.calculate_padded_vocab_size; `allow_shape_mismatch` of
    megatron.core.tensor_parallel.layers.VocabParallelEmbedding.sharded_state_dict and LanguageModule
    """
    divisor, vocab = change.number("vocab_divisor"), change.number("vocab")
    tensors = [tensor for key, tensor in change.ckpt.tensors.items() if _EMBEDDING.fullmatch(key)]
    if not tensors or not divisor or not change.changes("tp"):
        return
    rows = tensors[0].global_shape[0]
    keys = tuple(tensor.fqn for tensor in tensors)
    step = divisor * change.new["tp"]
    source = "megatron-core 0.12-0.19, tensor_parallel.layers.VocabParallelEmbedding.sharded_state_dict"
    if vocab is not None and vocab <= rows:
        padded = -(-vocab // step) * step
        if padded != rows:
            what = f"{abs(padded - rows):,} {'more' if padded > rows else 'fewer'} rows of padding"
            sentence = f"the load pads the vocabulary to {padded:,} rows, not {rows:,}: {what}, and no token is lost"
            if padded > rows and form_of(change.ckpt) == "fully_sharded_model_space":
                sentence += "; the optimizer states of the new rows stay unset"
            yield Constraint("note", sentence, keys, source)
        return
    # Without a declared vocabulary the rows bound it, if the old job padded to divisor x tp too. If both bounds pad to
    # the stored rows, the new job builds the same table whatever the number of tokens is.
    fewest = max(rows - divisor * change.old["tp"] + 1, 1)
    if vocab is None and -(-fewest // step) * step == -(-rows // step) * step == rows:
        return
    sentence = (
        f"the load pads the vocabulary to a multiple of {step:,} rows (now {rows:,}); the checkpoint does not say how "
        "many of them are padding, and Megatron-Core takes any number"
    )
    yield Constraint("note", sentence, keys, source, guessed=True)


_EMBEDDING = lazy_pattern(r"(?:.*\.)?(?:embedding\.word_embeddings|output_layer)\.weight")


def _not_judged(change: _Change) -> Iterator[Constraint]:
    """Notes on what cannot be judged without the job's arguments."""
    if not change.layout_is_declared:
        none = "the checkpoint holds no arguments of the job"
        refused = Constraint("fails", f"{none}, so the load stops", source=_MEGATRON_LM)
        yield from _by_version(change, KNOWN[0], (0, 15), refused)
        sentence = f"{none}: ckptlint did not judge heads, layers, experts and the padding of the vocabulary"
        known = ", ".join(f"{axis} {size}" for axis, size in change.old.items())
        sentence += f"; it judged the layout ({known})" if known else ", nor the layout"
        yield Constraint("note", sentence, source=_MEGATRON_LM, guessed=True)
