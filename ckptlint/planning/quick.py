"""The quick form of a job: each rank's requests derived from axis sizes, without torch and without the job's code.

Ranks are numbered as in torchtitan and Megatron-Core: tp varies fastest, then cp, dp (shards, then replicas) and pp.
FSDP cuts the first axis after tensor parallelism, by ceiling division with empty tails, as torch does. The axis that tp
cuts comes from the stored chunks, else from the function of the tensor; layers go to stages in equal runs, and experts
to ep ranks. `Job.constraints` lists every assumption, marked as guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ckptlint.analysis.layers.hidden_size import hidden_sizes
from ckptlint.analysis.layers.projections import axis_factor
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.errors import BudgetError, ConfigError
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural
from ckptlint.model.tiling import BoolArray, IntArray
from ckptlint.patterns import lazy_pattern
from ckptlint.planning.job import Job, Target, TensorRequest
from ckptlint.planning.model_sizes import undivided
from ckptlint.planning.outcome import Constraint
from ckptlint.planning.rank_files import lost_by_dp_ranks
from ckptlint.vocabulary.keys import Key, block_of

JOB_AXES = ("dp", "dp_shard", "dp_replicate", "fsdp", "tp", "pp", "vpp", "ep", "etp", "cp")
"""Axes of `--to`: `fsdp` and `dp_shard` are other names of `dp`."""

MOST_RANKS = 1 << 17
_MOST_ROWS = 1 << 24  # of all targets
_SIZE = lazy_pattern(r"\s*(\w+)\s*=\s*(-?[0-9]+)\s*")
_COLUMN = frozenset({"qkv", "q", "k", "v", "mlp_in", "output", "embedding"})
_ROW = frozenset({"attn_out", "mlp_out"})
_FIRST, _LAST = frozenset({"embedding"}), frozenset({"norm", "output"})


def axis_sizes(text: str) -> dict[str, int]:
    """The sizes of axes in `dp=8,tp=2`, or ConfigError.

    >>> axis_sizes("dp_shard=8, tp=2")
    {'dp': 8, 'tp': 2}
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        match = _SIZE.fullmatch(item)
        if match is None:
            raise ConfigError(f"{item.strip() or text!r} is not an axis with a size such as dp=8")
        name = "dp" if match[1] in ("fsdp", "dp_shard") else match[1]
        if name not in JOB_AXES:
            raise ConfigError(f"there is no axis {match[1]!r}, only {', '.join(JOB_AXES)}")
        if name in sizes:
            raise ConfigError(f"{text} names the axis {name} twice")
        if match[2].startswith("-") or len(match[2]) > 9 or not (size := int(match[2])):
            raise ConfigError(f"{match[1]}={match[2][:20]} is not the size of an axis: give a whole number from 1 up")
        sizes[name] = size
    world = world_of(sizes)
    if world > MOST_RANKS:
        raise ConfigError(f"{text} has {world:,} ranks: plan {MOST_RANKS:,} at most")
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    if world // sizes.get("pp", 1) % (sizes.get("etp", tp) * ep):
        count = world // sizes.get("pp", 1) // (1 if "etp" in sizes else tp)
        cells = f"ep={ep} x etp={sizes['etp']}" if "etp" in sizes else f"ep={ep}"
        axes = "dp, cp and tp" if "etp" in sizes else "dp and cp"
        raise ConfigError(f"{cells} does not divide the {plural(count, 'rank')} of {axes} in {text}: ep adds no ranks")
    return sizes


def world_of(sizes: Mapping[str, int]) -> int:
    """Number of ranks: ep and etp reuse the ranks of dp, cp and tp, and vpp adds none."""
    return prod(size for axis, size in sizes.items() if axis not in ("ep", "etp", "vpp"))


def quick_job(ckpt: Checkpoint, to: str) -> Job:
    """The job with these sizes of axes, whose ranks request every stored key, or ConfigError, or BudgetError."""
    sizes = axis_sizes(to)
    work = _Cutter(ckpt, _Ranks.of(sizes))
    requests = list(work.requests())
    constraints = [Constraint("note", sentence, tuple(keys), guessed=True) for sentence, keys in work.guessed.items()]
    if unsound := tuple(name for name, tensor in ckpt.tensors.items() if not tensor.is_sound):
        constraints.insert(0, Constraint("fails", "the chunks do not fit the tensor's shape", unsound))
    refused = () if ckpt.is_torch_dist else undivided(ckpt, sizes)
    return Job("quick", to, world_of(sizes), requests, (*refused, *lost_by_dp_ranks(ckpt, sizes), *constraints))


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """The coordinates of all ranks: int64 [world] per axis; `shard` is dp shards and cp together."""

    sizes: Mapping[str, int]
    at: Mapping[str, IntArray]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> _Ranks:
        """From the sizes of axes, 1 where none is given."""
        order = ("pp", "dp_replicate", "dp", "cp", "tp")
        grid = np.indices([sizes.get(axis, 1) for axis in order]).reshape(len(order), -1)
        at = dict(zip(order, grid, strict=True))
        cp, ep = sizes.get("cp", 1), sizes.get("ep", 1)
        at["shard"] = at["dp"] * cp + at["cp"]
        spread = at["dp_replicate"] * sizes.get("dp", 1) * cp + at["shard"]
        tp, etp = sizes.get("tp", 1), sizes.get("etp", sizes.get("tp", 1))
        at["etp"] = (spread * tp + at["tp"]) % etp  # etp varies fastest, then ep: one expert's replicas are apart
        at["ep"] = (spread * tp + at["tp"]) // etp % ep
        at["within_ep"] = (at["shard"] * tp + at["tp"]) // (etp * ep)
        full = {axis: sizes.get(axis, 1) for axis in (*order, "ep", "vpp")}
        full |= {"etp": etp, "shard": full["dp"] * cp, "within_ep": max(full["dp"] * cp * tp // (etp * ep), 1)}
        return cls(full, at)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.at["tp"])


_Cut = tuple[int, str, int]
"""(axis of the tensor, mesh axis that cuts it, runs of each rank: 2 for a fused gate and up, else 1)."""


@dataclass(eq=False)
class _Cutter:
    """Builds the target of each tensor; tensors with the same shape and cuts share one."""

    ckpt: Checkpoint
    ranks: _Ranks
    targets: dict[tuple[object, ...], Target] = field(default_factory=dict)
    guessed: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    everyone: dict[tuple[object, ...], IntArray] = field(default_factory=dict)
    rows: int = 0

    def requests(self) -> Iterator[TensorRequest]:
        """One request for each tensor, and for each object that all ranks read."""
        inventory = inventory_of(self.ckpt)
        params = {param.tensor.fqn: param for param in inventory.params}
        for copies in inventory.copies.values():
            params |= {param.tensor.fqn: param for param in copies}
        owners = {state.tensor.fqn: state.param for state in inventory.states if state.param is not None}
        self.layers: dict[str, int] = defaultdict(int)
        for key in (param.key for param in params.values()):
            if key.block and key.layer is not None:
                self.layers[key.block] = max(self.layers[key.block], key.layer + 1)
        self.experts = 1 + max((p.key.expert for p in params.values() if p.key.expert is not None), default=-1)
        self.hidden = hidden_sizes(self.ckpt)
        # Buffers and scalars stay whole under FSDP too. If more than half of the tensors are cut, the
        # saving job sharded its model; else its chunks show nothing about the axes.
        self.cut = sum(len(tensor.chunks) > 1 for tensor in self.ckpt.tensors.values())
        self.is_cut = self.cut * 2 > len(self.ckpt.tensors)
        for name, tensor in self.ckpt.tensors.items():
            if not tensor.is_sound:
                continue
            param = params.get(name)
            owner = owners.get(name)
            if param is not None:
                yield self._request(tensor, param, "model")
            elif owner is not None and owner.tensor.global_shape == tensor.global_shape:
                yield self._request(tensor, owner, "optimizer")
            else:
                yield self._other(tensor, owner)
        everyone = np.arange(self.ranks.world)
        for item in self.ckpt.byte_objects:
            yield TensorRequest(item.fqn, None, None, everyone)
        if self.ckpt.objects:
            self._guess("objects of Megatron-Core are not counted", *sorted(self.ckpt.objects.keys))

    def _guess(self, sentence: str, *keys: str) -> None:
        self.guessed[sentence].update(dict.fromkeys(keys))

    # ------------------------------------------------------------ who, and how it is cut

    def _request(self, tensor: Tensor, param: Param, part: str) -> TensorRequest:
        """The request for a parameter, or for an optimizer state of its shape."""
        key = param.key
        cuts: list[_Cut] = []
        if param.layer_axis is not None:
            cuts.append((param.layer_axis, "pp", 1))
        who = self._who(key, param.layer_axis is not None)
        if param.expert_axis is not None and self.ranks.sizes["ep"] > 1:
            cuts.append((param.expert_axis, "ep", 1))
        over = "etp" if key.in_experts else "tp"
        if self.ranks.sizes[over] > 1:
            cuts += [(axis, over, runs) for axis, runs in self._tensor_parallel(tensor, param)]
        cuts += self._sharded(tensor, param, part)
        return TensorRequest(tensor.fqn, None, self._target(tensor, cuts, who), who[1])

    def _other(self, tensor: Tensor, owner: Param | None) -> TensorRequest:
        """The request for a tensor without a parameter of its shape: steps, factored states, flat buffers."""
        who = self._who(owner.key, False) if owner is not None else ("all", np.arange(self.ranks.world))
        cuts: list[_Cut] = []
        if tensor.global_shape and len(tensor.chunks) > 1:
            cuts = [(0, "shard", 1)]
            self._guess("dp cuts the first axis, since the checkpoint does not say how the job cuts it", tensor.fqn)
        return TensorRequest(tensor.fqn, None, self._target(tensor, cuts, who), who[1])

    def _who(self, key: Key, is_stacked: bool) -> tuple[object, IntArray]:
        """(name of the group of ranks, ranks) that hold a parameter."""
        ranks, chosen, name = self.ranks, np.ones(self.ranks.world, bool), []
        pp = ranks.sizes["pp"]
        if pp > 1 and not is_stacked and (stage := self._stage(key, pp)) is not None:
            chosen &= ranks.at["pp"] == stage
            name.append(("pp", stage))
        if ranks.sizes["ep"] > 1 and key.expert is not None:
            ep_rank = key.expert * ranks.sizes["ep"] // max(self.experts, 1)
            if self.experts % (ep := ranks.sizes["ep"]):
                self._guess(f"{self.experts} experts are spread over ep {ep} as evenly as possible", key.fqn)
            chosen &= ranks.at["ep"] == ep_rank
            name.append(("ep", ep_rank))
        if tuple(name) not in self.everyone:
            self.everyone[tuple(name)] = np.flatnonzero(chosen)
        return tuple(name), self.everyone[tuple(name)]

    def _stage(self, key: Key, pp: int) -> int | None:
        """The pipeline stage of a parameter; None where all stages hold it."""
        vpp = self.ranks.sizes["vpp"]
        if key.block:
            count = self.layers.get(key.block, 0)
            if key.layer is None:
                return None
            if count % (pp * vpp):
                self._guess(f"{count} layers are spread over {pp * vpp} stages as evenly as possible", key.fqn)
            return key.layer * pp * vpp // max(count, 1) % pp
        if key.function in _FIRST:
            if any(param.key.function == "output" for param in inventory_of(self.ckpt).params):
                return 0
            self._guess("the first and the last stage hold it: no output layer is stored, so it may be tied", key.fqn)
            return None
        if key.function in _LAST:
            return pp - 1
        self._guess("every stage holds it: the checkpoint does not say which one does", key.fqn)
        return None

    # ------------------------------------------------------------ tensor parallelism

    def _tensor_parallel(self, tensor: Tensor, param: Param) -> list[tuple[int, int]]:
        """[(axis that tp cuts, runs)]; [] where each rank has the whole tensor."""
        axes, key = param.own_axes, param.key
        cut_axes = [axis for axis in axes if axis_factor(tensor, axis) > 1]
        # Evidence before convention. Megatron-Core replicates parameters over dp, so every cut there is from tp.
        # Elsewhere the first axis may be cut by FSDP, by tp or by both, and only a cut of a later axis shows tp.
        if self.ckpt.is_torch_dist and len(cut_axes) == 1:
            return [(cut_axes[0], self._runs(key, tensor, cut_axes[0]))]
        if len(axes) > 1 and (later := [axis for axis in cut_axes if axis != axes[0]]):
            return [(later[0], 1)]  # FSDP only cuts the first axis, so tp cut this one
        axis = self._by_role(param)
        if axis is None:
            return []
        if tensor is param.tensor:  # one guess for the parameter covers its states
            self._guess(f"tp cuts dim {axis}, as is usual for such a tensor", tensor.fqn)
        return [(axis, self._runs(key, tensor, axis) if self.ckpt.is_torch_dist else 1)]

    def _by_role(self, param: Param) -> int | None:
        """The axis that tp usually cuts for this function; None where it cuts none."""
        axes, key = param.own_axes, param.key
        if not axes:
            return None
        if key.function in _COLUMN and len(axes) == 1:
            return axes[0]
        if len(axes) != 2 or key.function not in _COLUMN | _ROW:
            return None
        inner = axes[0] if key.function in _COLUMN else axes[1]
        hidden = self.hidden.get(block_of(key))
        if (
            hidden is not None
            and param.own_shape.count(hidden.size) == 1
            and key.function not in ("embedding", "output")
        ):
            # Column and row order assume [out, in], but experts may be stored [in, out]. tp does not cut the
            # hidden size, so the other axis is the cut one.
            inner = axes[1 - param.own_shape.index(hidden.size)]
        return inner

    def _runs(self, key: Key, tensor: Tensor, axis: int) -> int:
        """2 for a fused gate and up projection of Megatron-Core, whose halves are cut separately; else 1."""
        gated = self.ckpt.declared.get("gated")
        is_fused = key.function == "mlp_in" and not key.component and gated is not None and bool(gated.value)
        return 2 if is_fused and tensor.global_shape[axis] % 2 == 0 else 1

    # ------------------------------------------------------------ data parallelism

    def _sharded(self, tensor: Tensor, param: Param, part: str) -> list[_Cut]:
        """The cuts that dp adds to a parameter or its states."""
        in_experts = param.key.in_experts and self.ranks.sizes["ep"] > 1
        over = "within_ep" if in_experts else "shard"
        if self.ranks.sizes[over] == 1 or not tensor.global_shape:
            return []
        if self.ckpt.is_torch_dist:
            if part == "model":
                return []  # each dp rank has a copy
            self._guess("dp cuts the optimizer state evenly: Megatron-Core cuts its flat buffers instead", tensor.fqn)
            return [(param.own_axes[0], over, 1)] if param.own_axes else []
        if self.is_cut and len(tensor.chunks) == 1 and tensor.global_shape[0] > 1 and param.key.function == "other":
            return []  # whole in a sharded checkpoint and without a known function: a buffer, which FSDP replicates
        if not self.is_cut:
            is_few = f"only {self.cut:,} of {len(self.ckpt.tensors):,} tensors are stored in more than one chunk"
            why = is_few if self.cut else "the checkpoint is not cut and does not say"
            self._guess(f"FSDP cuts the first axis, since {why}", tensor.fqn)
        return [(0, over, 1)]

    # ------------------------------------------------------------ boxes

    def _target(self, tensor: Tensor, cuts: list[_Cut], who: tuple[object, IntArray]) -> Target:
        key = (tensor.global_shape, tuple(cuts), who[0])
        if key not in self.targets:
            self.rows += len(who[1])
            if self.rows > _MOST_ROWS:
                raise BudgetError("there are too many ranks for so many shapes of tensors: plan fewer ranks")
            self.targets[key] = self._cut(tensor.global_shape, cuts, who[1])
        return self.targets[key]

    def _cut(self, shape: tuple[int, ...], cuts: list[_Cut], who: IntArray) -> Target:
        """The boxes of these ranks; a rank with an empty part has no box."""
        halves = [(axis, runs) for axis, _, runs in cuts if runs > 1]
        pieces = []
        for run in range(halves[0][1] if halves else 1):
            start = np.zeros((len(who), len(shape)), np.int64)
            stop = np.tile(np.array(shape, np.int64), (len(who), 1))
            if halves:
                axis, runs = halves[0]
                start[:, axis], stop[:, axis] = shape[axis] * run // runs, shape[axis] * (run + 1) // runs
            for axis, over, _ in cuts:
                length = -(-(stop[:, axis] - start[:, axis]) // self.ranks.sizes[over])
                start[:, axis] = np.minimum(start[:, axis] + length * self.ranks.at[over][who], stop[:, axis])
                stop[:, axis] = np.minimum(start[:, axis] + length, stop[:, axis])
            live: BoolArray = np.asarray((stop > start).all(axis=1))
            pieces.append((who[live], start[live], (stop - start)[live]))
        columns = [np.concatenate([piece[column] for piece in pieces]) for column in range(3)]
        return Target.of_ranks(shape, *columns)
