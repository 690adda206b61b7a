"""Finds keys, shapes, dtypes and numbers of chunks that changed between two states of one job.

Between two steps of a run only values should change. A complete change (a module, an optimizer, a dtype everywhere)
counts as intended; one that leaves siblings unchanged (a layer, one moment) does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ckptlint.analysis.optimizer.inventory import optimizer_parts, split_state
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural, shape_text
from ckptlint.vocabulary.keys import parse, role

KIND_NAMES = {
    "model": "model",
    "optimizer": "optimizer",
    "runtime": "state of the job (random numbers, scheduler, data)",
}
"""Kinds of keys in words."""

ChangeKind = Literal["gone", "new", "shape", "dtype", "cut"]

_CORE = ("embedding", "output", "norm")


class StoredKey(NamedTuple):
    """The kind and size of a stored entry.

    Attributes:
        dtype: dtype of a tensor; else `object` or `bytes`.
        shape: shape of a tensor in elements.
        parts: number of chunks of a tensor, or of shards of an object.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    parts: int = 1

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return self.dtype not in ("object", "bytes")

    def __str__(self) -> str:
        return f"{self.dtype} {shape_text(self.shape)}" if self.is_tensor else self.dtype


class Change(NamedTuple):
    """Keys of one role that changed alike.

    Attributes:
        kind: the keys are gone, new, or hold another shape, dtype or number of chunks.
        was, now: the entry of the first key in either state.
        is_partial: whether siblings that should have changed too did not.
        rest: the unchanged siblings, in words; "" without any.
    """

    kind: ChangeKind
    fqns: tuple[str, ...]
    was: StoredKey | None
    now: StoredKey | None
    is_partial: bool
    rest: str = ""

    def sentence(self, here: str, before: str) -> str:
        """The change as a sentence with `{of}` for the key; `here` is as `stored here`, `before` the older state."""
        was, now = self.was or StoredKey("nothing"), self.now or StoredKey("nothing")
        return {
            "gone": f"no part{{of}} is {here}; {before} has {was}",
            "new": f"{now}{{of}} is new; {before} lacks it",
            "shape": f"the shape{{of}} is {shape_text(now.shape)}; it was {shape_text(was.shape)} in {before}",
            "dtype": f"the dtype{{of}} is {now.dtype}; it was {was.dtype} in {before}",
            "cut": f"the number of chunks{{of}} is {now.parts:,}; it was {was.parts:,} in {before}",
        }[self.kind]


def older_name(ckpt: Checkpoint) -> str:
    """The folder name of the step before, without a common end of both paths; "" without an older step."""
    if ckpt.before is None:
        return ""
    mine, theirs = (path.rstrip("/").split("/") for path in (ckpt.path, ckpt.before.path))
    while len(theirs) > 1 and mine and mine[-1] == theirs[-1]:
        mine.pop()
        theirs.pop()
    return theirs[-1]


def stored_keys(ckpt: Checkpoint) -> dict[str, StoredKey]:
    """Key -> its entry, for all tensors, objects and bytes of a checkpoint."""
    entries = {t.fqn: StoredKey(t.dtype, t.global_shape, len(t.chunks)) for t in ckpt.tensors.values()}
    entries |= {entry.fqn: StoredKey("bytes") for entry in ckpt.byte_objects}
    shards = Counter[str]()
    for key, _, rows in ckpt.objects.rows_by_grid():
        shards[key] += len(rows)
    return entries | {key: StoredKey("object", (), count) for key, count in shards.items()}


Entries = Mapping[str, StoredKey]


def changes(was: Entries, now: Entries) -> Iterator[Change]:
    """The changes, one for all keys of a role that changed alike."""
    if was == now:
        return
    yield from _gone(was, now, _by_role(now))
    before = {role(fqn) for fqn in was}
    for name, fqns in _by_role(fqn for fqn in now if fqn not in was).items():
        yield from _alike("new", fqns, was, now, name in before)
    yield from _altered(was, now)


def _by_role(fqns: Iterable[str]) -> dict[str, list[str]]:
    return grouped((role(fqn), fqn) for fqn in fqns)


def _gone(was: Entries, now: Entries, after: Mapping[str, list[str]]) -> Iterator[Change]:
    """Keys that this step lacks, by role, with the siblings that show whether the change was intended."""
    kinds = {parse(fqn).kind for fqn in now}
    params = {role(path) for state, path in map(_state, now) if state}
    lost = [fqn for fqn in was if fqn not in now]
    params_lost = {parse(fqn).path for fqn in lost if parse(fqn).kind == "model"}
    lost = [fqn for fqn in lost if _state(fqn)[1] not in params_lost]  # states of a lost parameter are no second fault
    modules = {name.rpartition(".")[0] for name in after}
    for name, fqns in _by_role(lost).items():
        key, (state, path) = parse(fqns[0]), _state(fqns[0])
        # Evidence from strong to weak that the loss was not intended. None of it: a module or the optimizer was left
        # out on purpose (RUN001: "the whole optimizer was left out: info", "a module was taken out of the model:
        # info").
        if name in after:
            rest = f"{len(after[name]):,} of the same role still stored"
        elif key.kind not in kinds:
            rest = ""  # the step holds nothing of the kind any more
        elif state and role(path) in params:
            rest = "other states of the same parameters are still stored"
        elif key.kind == "model" and role(key.path) in params:
            rest = "its optimizer state stays"
        elif key.kind == "runtime" and "optimizer" in kinds:
            rest = "the optimizer stays, so the job meant to go on"
        elif key.kind == "model" and (key.function in _CORE or name.rpartition(".")[0] in modules):
            rest = "the rest of the model is still stored"
        else:
            rest = ""
        yield from _alike("gone", fqns, was, now, bool(rest), rest)


def _state(fqn: str) -> tuple[str, str]:
    """Name of an optimizer state and path of its parameter; "" for both where it names none."""
    key = parse(fqn)
    rest = optimizer_parts(key)[1] if key.kind == "optimizer" else ""
    named = split_state(rest.removeprefix("state.")) if rest.startswith("state.") else None
    return ("", "") if named is None else (named[0], parse(named[1]).path)


def _altered(was: Entries, now: Entries) -> Iterator[Change]:
    """Shared keys whose shape, dtype or number of chunks changed, by role."""
    shared = [fqn for fqn in was if fqn in now]
    by_role = _by_role(shared)
    # all parameters change their dtype together, or all states of one name
    kind_of = {name: _state(fqns[0])[0] or parse(fqns[0]).kind for name, fqns in by_role.items()}
    same_dtype = Counter[str]()
    for name, fqns in by_role.items():
        same_dtype[kind_of[name]] += sum(was[fqn].dtype == now[fqn].dtype for fqn in fqns)
    recut = sum(was[fqn].parts != now[fqn].parts for fqn in shared)
    reshaped = {fqn: (was[fqn].shape, now[fqn].shape) for fqn in shared if was[fqn].shape != now[fqn].shape}
    of_param = {parse(fqn).path: shapes for fqn, shapes in reshaped.items() if parse(fqn).kind == "model"}
    # states that changed as their parameter did are no second fault
    reshaped = {fqn: shapes for fqn, shapes in reshaped.items() if of_param.get(_state(fqn)[1]) != shapes}
    for name, fqns in by_role.items():
        shapes = [fqn for fqn in fqns if fqn in reshaped]
        dtypes = [fqn for fqn in fqns if was[fqn].dtype != now[fqn].dtype]
        fewer = [fqn for fqn in fqns if was[fqn].parts > now[fqn].parts and was[fqn].shape == now[fqn].shape]
        if shapes:
            first = shapes[0]
            # Added tokens lengthen embedding and head together, which is intended.
            grown = parse(first).function in ("embedding", "output") and was[first].shape[1:] == now[first].shape[1:]
            rest = _stay(len(fqns) - len(shapes))
            yield from _alike("shape", shapes, was, now, bool(rest) or not grown, rest)
        if dtypes:
            rest = _stay(same_dtype[kind_of[name]])
            yield from _alike("dtype", dtypes, was, now, bool(rest), rest)
        # Another world size cuts most keys anew (RUN001: "another world size"). Below half, fewer chunks are a lost
        # rank.
        if fewer and recut * 2 < len(shared):
            rest = _stay(len(shared) - recut)
            yield from _alike("cut", fewer, was, now, len(fewer) < len(fqns), rest)


def _alike(
    kind: ChangeKind, fqns: Iterable[str], was: Entries, now: Entries, is_partial: bool, rest: str = ""
) -> Iterator[Change]:
    """One change for each set of keys with the same entries before and after."""

    def look(fqn: str) -> tuple[object, ...]:
        return tuple(entry and (entry.parts if kind == "cut" else str(entry)) for entry in (was.get(fqn), now.get(fqn)))

    for names in grouped((look(fqn), fqn) for fqn in fqns).values():
        yield Change(kind, tuple(names), was.get(names[0]), now.get(names[0]), is_partial, rest)


def _stay(count: int) -> str:
    return f"{plural(count, 'other', 'is')} unchanged" if count else ""
