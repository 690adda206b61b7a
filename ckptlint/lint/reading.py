"""Reads what the records of a checkpoint hold, and draws elements from tensors that follow from each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ckptlint.analysis.optimizer.pairs import pairs_of
from ckptlint.analysis.step_before.follows import follows_of
from ckptlint.analysis.step_before.leaps import leaps_of
from ckptlint.depth import Depth
from ckptlint.errors import UnreadableError
from ckptlint.grouping import grouped
from ckptlint.loaders.problems import from_error
from ckptlint.model import Checkpoint, Damage, PairTable, PayloadTable, Problem
from ckptlint.model.checkpoint import with_optimizers
from ckptlint.model.text import plural
from ckptlint.model.tiling import distinct
from ckptlint.numerics.draw import Elements, draw_changes, draw_pairs, records_to_draw
from ckptlint.numerics.origins import origins_of
from ckptlint.numerics.settings import setting_records
from ckptlint.payload.archives.whole import place_beside
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import ReadOptions
from ckptlint.rule import require
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.keys import parse, state_name

_BY_DATA, _BY_HEADERS, _BY_DRAWING = (65_536, 16_384), (4_096, 2_048), (1_024, 4_096)
"""Elements of a chunk that are drawn, and chunks, at depths `data` and `headers`, and where nothing else is read."""

_OPENED = 2_048  # chunks whose records are opened only to draw from them, with those that are compared with them


def read_records(folder: Folder, ckpt: Checkpoint, how: ReadOptions, after: Checkpoint | None = None) -> Checkpoint:
    """The checkpoint with `payload`, and with `pairs` where all records were asked for; so with its `optimizers`.

    Where it is read to be compared with the step `after` it, its tensors are not compared with each other. Raises
    AccessError and KeyboardInterrupt as `read_payload`.
    """
    if how.draws:
        drawn = records_to_draw(ckpt, after or ckpt, _drawn_together(after or ckpt), _OPENED)
        how = replace(how, wanted=distinct(np.concatenate([drawn, setting_records(ckpt)])))
    ckpt = read_payload(folder, ckpt, how)
    if how.percent is not None:
        return ckpt
    ckpt = _with_optimizers(folder, ckpt, how, after)
    return ckpt if after is not None else _with_pairs(folder, ckpt, how)


def _with_pairs(folder: Folder, ckpt: Checkpoint, how: ReadOptions) -> Checkpoint:
    pairs = draw_pairs(folder, ckpt, pairs_of(ckpt), *_amounts(how))
    return replace(ckpt, pairs=pairs, not_looked_at=(*ckpt.not_looked_at, *_not_drawn(pairs, how.draws)))


def _with_optimizers(folder: Folder, ckpt: Checkpoint, how: ReadOptions, after: Checkpoint | None) -> Checkpoint:
    """The checkpoint with what was read of its `optimizers`; their values were read with it, at depth `data`."""
    unread = {problem.file for problem in ckpt.problems if problem.kind in ("unreadable", "container", "limit")}
    later = {_place_of(states): states for states in after.optimizers} if after is not None else {}
    problems, unseen, read = list[Problem](), list[str](), list[Checkpoint]()
    for states in ckpt.optimizers:
        label = states.files.names[0]
        states = replace(states, path=ckpt.path, run=ckpt.run, claims=(*states.claims, *ckpt.claims))
        try:
            if label not in unread:
                # the places of their records
                later_states = later.get(_place_of(states), states)
                places = replace(how, depth=Depth.HEADERS, wanted=None, digests={}, rows=(), sums=None)
                if how.draws:
                    places = replace(
                        places, wanted=records_to_draw(states, later_states, _drawn_together(later_states), _OPENED)
                    )
                states = read_payload(place_beside(folder, label)[0], states, places)
        except UnreadableError as error:
            problems += [] if how.depth.reads_all else [from_error(error, label)]  # else it is told already
        if states.payload is not None:
            states = replace(states, payload=_with_values(states.payload, states, require(ckpt.payload)))
            if after is None:
                states = _with_pairs(place_beside(folder, label)[0], states, how)
            problems += [] if how.depth.reads_all else states.problems
            unseen += [f"of {label} only {sample} were read"] if (sample := require(states.payload).sample) else []
            unseen += states.not_looked_at
        read.append(states)
    ckpt = replace(
        ckpt, problems=[*ckpt.problems, *problems], not_looked_at=tuple(dict.fromkeys([*ckpt.not_looked_at, *unseen]))
    )
    return with_optimizers(ckpt, read)


def _place_of(states: Checkpoint) -> tuple[str, str]:
    """The file of an optimizer, and the stem of its keys, by which it is found in another step."""
    return states.files.names[0], next(iter(states.tensors), "").partition(".state.")[0]


def _with_values(payload: PayloadTable, states: Checkpoint, whole: PayloadTable) -> PayloadTable:
    """The payload of an optimizer with the values and damages that were found in its file with the whole checkpoint."""
    label, damaged = states.files.names[0], {(damage.file, damage.member): damage for damage in whole.damages}
    damages = list[Damage]()
    for record in range(len(states.records)):
        content = payload.of(record)
        member = "" if content is None else content.key
        if (label, member) in damaged:
            damages.append(damaged[label, member]._replace(record=record))
        elif content is not None and content.offset == 0 and (values := whole.beside.get((label, member))) is not None:
            payload.scanned[record] = True
            for column, value in values.items():
                payload.rows[column][record] = value
    return replace(payload, damages=(*payload.damages, *damages))


def with_changes(folder: Folder, ckpt: Checkpoint, before: Folder, how: ReadOptions) -> Checkpoint:
    """The checkpoint with `changes`, and what leapt chunks hold, where it and the step before it were read.

    Raises AccessError where a read is refused.
    """
    older = ckpt.before
    if ckpt.payload is None or older is None or older.payload is None or how.percent is not None:
        return ckpt
    earlier = {_place_of(states): states for states in older.optimizers}
    optimizers = list[Checkpoint]()
    for states in ckpt.optimizers:
        label = states.files.names[0]
        older_states = earlier.get(_place_of(states))
        if states.payload is not None and older_states is not None and older_states.payload is not None:
            places = place_beside(folder, label)[0], place_beside(before, label)[0]
            states = _with_changes(replace(states, before=older_states), older_states, *places, how)
        optimizers.append(states)
    return _with_changes(with_optimizers(ckpt, optimizers), older, folder, before, how)


def _with_changes(ckpt: Checkpoint, older: Checkpoint, folder: Folder, before: Folder, how: ReadOptions) -> Checkpoint:
    now, was = Elements(folder, ckpt), Elements(before, older)
    changes = draw_changes(now, was, follows_of(ckpt, older), *_amounts(how))
    leaps = leaps_of(replace(ckpt, changes=changes))
    origins = {row: origin for leap in leaps for row, origin in origins_of(now, was, changes, leap.rows).items()}
    return replace(ckpt, changes=replace(changes, origins=origins))


def _amounts(how: ReadOptions) -> tuple[int, int]:
    return _BY_DRAWING if how.draws else _BY_DATA if how.depth.reads_all else _BY_HEADERS


def _drawn_together(ckpt: Checkpoint) -> list[tuple[str, ...]]:
    """The keys of weights and states: those that are compared with each other together, the others alone."""
    groups = [(pair.first, pair.second) for pair in pairs_of(ckpt)]
    paired = {key for group in groups for key in group}
    keys = (tensor.fqn for tensor in ckpt.sound_tensors() if tensor.volume > 1 and tensor.fqn not in paired)
    return [*groups, *((key,) for key in keys if parse(key).kind == "model" or state_name(key))]


def _not_drawn(pairs: PairTable, draws: bool) -> Iterator[str]:
    """What was left out of the comparison of tensors that follow from each other, as sentences.

    With `draws` only some records were opened, which the report says already.
    """
    for reason, (first, *others) in grouped((reason, pair) for pair, reason in pairs.unread.items()).items():
        more = f" and {plural(len(others), 'more pair')}" if others else ""
        yield f"{first.first} was not compared with {first.second}{more}: {reason}"
    if len(pairs.rows) < pairs.chunks and not draws:
        left = plural(pairs.chunks - len(pairs.rows), "chunk")
        yield f"whether moments and master copies fit in {left} of {pairs.chunks:,} that could not be compared"
