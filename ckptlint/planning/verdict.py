"""Compares a checkpoint with a job's requests: what torch refuses, loses or converts, and what each rank reads."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ckptlint.geometry.record_states import CUT, record_states
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.tiling import IntArray
from ckptlint.planning.cost import Tally, needs_away, nodes_of, writer_nodes
from ckptlint.planning.job import Job, Target, TensorRequest
from ckptlint.planning.outcome import Constraint, Conversion, Effect, Mismatch, Plan
from ckptlint.planning.reads import ReadBudget, Reads, reads
from ckptlint.storage.folder import READABLE
from ckptlint.vocabulary.dtypes import ITEM_BITS, loses

_HELPERS = "torch 2.13, torch/distributed/checkpoint/planner_helpers.py: _create_read_items"
_LOADER = "torch 2.13, torch/distributed/checkpoint/state_dict_loader.py: _load_state_dict"
_READER = "torch 2.13, torch/distributed/checkpoint/filesystem.py: FileSystemReader.read_data"
_SENTENCES: dict[tuple[Effect, str], str] = {
    ("fails", "as an object"): "the job holds an object, the checkpoint a tensor: torch raises ValueError",
    ("fails", "not sound"): "the chunks do not fit the tensor's shape",
    ("fails", "no record"): "some chunks have no storage entry: the reader raises KeyError",
    ("fails", "no file"): "some chunks lie in missing files, or no files: the reader raises FileNotFoundError or hangs",
    ("fails", "cut file"): "some chunks end after the end of their file, which is cut short: torch cannot read them",
    ("fails", "other axes"): "the job wants a different number of axes from what the chunks have",
    ("drops", "hole"): "some elements are missing: the load skips them, and they keep what the job put there",
    (
        "fails",
        "own metadata",
    ): "each rank reads only the metadata of its own number (__N.metadata), and there are fewer of them than ranks",
    ("drops", "own metadata"): "each rank reads only the metadata of its own number (__N.metadata): what other "
    "ranks saved keeps what the job put there",
    ("note", "as a tensor"): "the job holds a tensor, the checkpoint an object: the object takes the tensor's place",
}
_SOURCES = {
    "as an object": _HELPERS, "as a tensor": _HELPERS, "no record": _READER, "no file": _READER, "own metadata": _LOADER
}  # fmt: skip


def plan_of(ckpt: Checkpoint, job: Job, per_node: int | None = None, from_nodes: int | None = None) -> Plan:
    """Whether the checkpoint loads into the job, and what each rank reads, or BudgetError.

    `per_node` ranks of the job are on one node; where `from_nodes` saved, each has only the files that it wrote.
    """
    work = _Work(ckpt, job, per_node or max(job.world, 1), from_nodes)
    for request in job.requests:
        work.take(request)
    work.add_own_metadata(job.world)
    cost = work.tally.cost()
    asked = {request.key for request in job.requests}
    stored = [*ckpt.tensors, *work.records]
    noted = [
        Constraint(effect, _SENTENCES[effect, what], tuple(keys), _SOURCES.get(what, ""))
        for (effect, what), keys in work.noted.items()
    ]
    nodes = nodes_of(cost, ckpt, per_node, work.homes) if per_node else ()
    return Plan(
        ckpt,
        job.form,
        job.to,
        job.world,
        tuple(work.missing),
        tuple(key for key in stored if key not in asked and job.form == "exact"),
        tuple(work.mismatches),
        tuple(work.converted.values()),
        (*job.constraints, *noted),
        cost,
        nodes,
        tuple(work.astray),
    )


class _Work:
    """Collects what is found for each request."""

    def __init__(self, ckpt: Checkpoint, job: Job, per_node: int, from_nodes: int | None) -> None:
        self.ckpt, self.per_node = ckpt, per_node
        self.tally = Tally(ckpt, job.world)
        self.records = {item.fqn: item.record for item in ckpt.objects}
        self.records |= {item.fqn: item.record for item in ckpt.byte_objects}
        self.homes = None if from_nodes is None else writer_nodes(ckpt, from_nodes)
        self.gone = ~ckpt.files.are(*READABLE, "unchecked")
        self.cut = record_states(ckpt) == CUT
        self.missing: dict[str, None] = {}
        self.mismatches: dict[Mismatch, None] = {}
        self.converted: dict[str, Conversion] = {}
        self.noted: dict[tuple[Effect, str], dict[str, None]] = defaultdict(dict)
        self.astray: dict[str, None] = {}
        self.reads_of: dict[tuple[int, int], tuple[Reads, bool]] = {}
        self.replicated: dict[bytes, Target] = {}
        self.budget = ReadBudget()

    def take(self, request: TensorRequest) -> None:
        """Check one request and count its reads."""
        tensor = self.ckpt.tensors.get(request.key)
        if tensor is None and request.key not in self.records:
            self.missing[request.key] = None
        elif tensor is None:
            if request.target is not None:
                self._note("note", "as a tensor", request.key)
            record = np.array([self.records[request.key]], np.int64)
            target = self.replicated.setdefault(request.ranks.tobytes(), Target.replicated((), request.ranks))
            none = np.zeros((1, 0), np.int64)
            item = Reads(np.zeros(1, np.int64), np.zeros(1, np.int64), none, none, none)
            self._add(request.key, target, item, record, None)
        elif request.target is None:
            self._note("fails", "as an object", request.key)
        elif request.target.shape != tensor.global_shape:
            self.mismatches[Mismatch(request.key, tensor.global_shape, request.target.shape)] = None
        elif not tensor.is_sound:
            self._note("fails", "not sound", request.key)
        else:
            if request.dtype not in (None, tensor.dtype):
                wanted = str(request.dtype)
                change = Conversion(request.key, tensor.dtype, wanted, loses(tensor.dtype, wanted))
                self.converted.setdefault(request.key, change)
            self._tensor(request.key, tensor, request.target)

    def add_own_metadata(self, world: int) -> None:
        """Obstacles from one metadata file per rank, which torch reads where no common one exists."""
        saved = self.ckpt.topology.get("world")
        if self.ckpt.format == "dcp-per-rank" and saved is not None and saved.size != world:
            for name, tensor in self.ckpt.tensors.items():
                if len(tensor.chunks) > 1 or world > saved.size:
                    self._note("fails" if world > saved.size else "drops", "own metadata", name)

    def _note(self, effect: Effect, what: str, key: str) -> None:
        self.noted[effect, what][key] = None

    def _tensor(self, key: str, tensor: Tensor, target: Target) -> None:
        """Add what a load reads of a tensor for a target; tensors cut alike are worked out once."""
        tiling = tensor.tiling
        if (id(tiling), id(target)) not in self.reads_of:
            items = reads(tiling, target, self.budget)
            filled = np.bincount(items.box, items.volume, len(target.offsets))
            has_hole = bool((filled < target.sizes.prod(axis=1)).any())
            # volumes are sums: an element stored twice hides one that is missing
            if not has_hole and len(tiling.live) and tiling.coverage.doubled:
                has_hole = tiling.coverage.missing_volume > 0
            self.reads_of[id(tiling), id(target)] = items, has_hole
        items, has_hole = self.reads_of[id(tiling), id(target)]
        if has_hole:
            self._note("drops", "hole", key)
        bits = ITEM_BITS.get(tensor.dtype)
        needed = None if bits is None else items.volume * bits // 8
        self._add(key, target, items, tensor.chunks.record[items.chunk], needed)

    def _add(self, key: str, target: Target, items: Reads, records: IntArray, needed: IntArray | None) -> None:
        """Count the items that have a record; those without one fail the load, without `needed` bytes all count."""
        has_record = records >= 0
        if not has_record.all():
            self._note("fails", "no record", key)
            columns = (items.box, items.chunk, items.in_chunk, items.in_box, items.lengths)
            items, records = Reads(*(column[has_record] for column in columns)), records[has_record]
            needed = None if needed is None else needed[has_record]
        if self.gone.any() and self.gone[self.ckpt.records.file[records]].any():
            self._note("fails", "no file", key)
        if self.cut[records].any():
            self._note("fails", "cut file", key)
        if needed is None:
            needed = self.ckpt.records.byte_length[records]
        self.tally.add(target, items, records, needed)
        files = self.ckpt.records.file[records]
        if self.homes is not None and needs_away(target, items, files, self.homes, self.per_node):
            self.astray[key] = None
