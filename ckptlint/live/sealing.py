"""Seals from inside the job: digests of what the ranks hold, and what a load made of what was sealed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ckptlint._version import __version__
from ckptlint.errors import CkptlintError, UnreadableError
from ckptlint.lint.report import Report
from ckptlint.live import api
from ckptlint.live.collect.limit import readable
from ckptlint.live.compare import fingerprints as fp
from ckptlint.live.compare import protocol
from ckptlint.loaders.checkpoint import read_checkpoint
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.model import RankFinding, Seal, SealEntry
from ckptlint.model.text import plural
from ckptlint.model.tiling import IntArray
from ckptlint.rule import Severity
from ckptlint.seals.digests import ALGORITHM, MASK, Words
from ckptlint.seals.file import SEAL, metadata_hash, read_seal, write_seal
from ckptlint.seals.verify import misfit_of
from ckptlint.storage.local import LocalFolder

_T = TypeVar("_T")

_IGNORED, _NO_DIGEST, _NO_MEMORY, _OBJECT, _FREED = 1, 2, 3, 4, 5
_REASONS = {
    _IGNORED: "ignored",
    _NO_DIGEST: "no digest for its dtype or class",
    _NO_MEMORY: "a rank ran out of memory for its digest",
    _OBJECT: "not a tensor on some rank",
    _FREED: "its memory was freed on some rank",
}
_UNLIKE = "a different dtype or shape in the state"
_OWNERS = "its owners do not hold each element once"
_NOWHERE = -(2**62)
_NAMED = 256
_TEXT_WORDS = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What all ranks know of the keys together; row i is one key.

    Attributes:
        key: uint64 [n], ascending; what `fingerprints.numbers` makes of its name with `salt`.
        seed: int64 [n], of its kind, dtype and shape.
        reason: int64 [n], why it has no digest; 0 where it has one.
        digests, counts: [n, 2], of all owners' elements, and with only the lowest rank of undeclared ones.
        positions: of the keys that this rank holds.
        torn: keys about which ranks do not agree.
    """

    key: Words
    salt: int
    seed: IntArray
    reason: IntArray
    digests: Words
    counts: IntArray
    positions: IntArray
    torn: frozenset[str]

    def places(self, fqns: Sequence[str]) -> list[int]:
        """The row of each key, -1 for one that no rank holds."""
        rows = {key: row for row, key in enumerate(self.key.tolist())}
        return [rows.get(key, -1) for key in fp.numbers(fqns, self.salt).tolist()]

    def digest(self, row: int, volume: int) -> int | None:
        """The digest of the whole tensor; None where no set of owners holds each element once."""
        return next((int(self.digests[row, i]) for i in range(2) if self.counts[row, i] == volume), None)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Digests that were taken, and wait for the checkpoint to be written.

    Attributes:
        problem: why there are none; "" normally. The same on all ranks.
    """

    problem: str
    step: int | None = None
    _sums: _Sums | None = field(default=None, repr=False)
    _is_writer: bool = True

    def write(self, path: str | Path) -> Path | None:
        """Write the seal beside the `.metadata` of a finished checkpoint; rank 0 does so, and nothing is communicated.

        Args:
            path: the folder of `.metadata`, or the safetensors files.

        Returns:
            The file; None on other ranks, and where there is nothing to write (a warning says why).

        Raises:
            CkptlintError: the checkpoint cannot be read, or the seal not be written.
        """
        if self._sums is None or not self._is_writer:
            if self.problem and self._is_writer:
                api.warn(lambda: f"the checkpoint was not sealed: {self.problem}")
            return None
        folder = LocalFolder(Path(path))
        ckpt = read_checkpoint(CheckpointPlace.at(folder), look_at_files=False)
        if not ckpt.readable:
            raise CkptlintError(f"cannot seal {ckpt.path}: it holds no readable checkpoint")
        described = {fqn: SealEntry(tensor.dtype, tensor.global_shape, 0) for fqn, tensor in ckpt.tensors.items()}
        entries, skipped = _entries(self._sums, described)
        return write_seal(folder.path, Seal(ALGORITHM, metadata_hash(folder), entries, skipped, self.step, __version__))


def _entries(sums: _Sums, described: Mapping[str, SealEntry]) -> tuple[dict[str, SealEntry], dict[str, str]]:
    """The entries with their digests, and why others have none."""
    entries, skipped = {}, {}
    seeds = _seeds(described)
    for (fqn, entry), row, seed in zip(described.items(), sums.places(list(described)), seeds, strict=True):
        if reason := _unlike(sums, fqn, row, seed):
            skipped[fqn] = reason
        elif (digest := sums.digest(row, int(np.prod(entry.shape, dtype=object)))) is None:
            skipped[fqn] = _OWNERS
        else:
            entries[fqn] = replace(entry, digest=digest)
    return entries, skipped


def _unlike(sums: _Sums, fqn: str, row: int, seed: int) -> str:
    """Why a key that is described by its seed cannot be compared with what the ranks hold; "" when it can."""
    if row < 0:
        return "not in the state"
    if sums.reason[row]:
        return _REASONS[int(sums.reason[row])]
    if fqn in sums.torn:
        return "the ranks disagree on it"
    return "" if sums.seed[row] == seed else _UNLIKE


def _seeds(described: Mapping[str, SealEntry]) -> list[int]:
    """The seed (`_Sums.seed`) of each key with such a description."""
    from ckptlint.live.collect.extract import RankChunk

    rank_chunks = [
        RankChunk(fqn, "tensor", "plain", entry.dtype, entry.shape, (0,) * len(entry.shape), entry.shape, 0, 1, None)
        for fqn, entry in described.items()
    ]
    return _short_seeds(fp.chunk_rows(rank_chunks, [0] * len(rank_chunks), {}))


def _short_seeds(rows: fp.Records) -> list[int]:
    return [int(seed) for seed in (fp.marks(rows, False).seed >> np.uint64(8)).tolist()]


# ---------------------------------------------------------------- what a job calls


def prepare_seal(
    state_dict: Mapping[Any, Any],
    *,
    tag: object = None,
    step: int | None = None,
    ignore: Iterable[str] = (),
    resolve_stateful: bool = True,
) -> Pending:
    """Take the digests of all tensors of a state, as it is now; call it on all ranks, on the main thread.

    Before an asynchronous save starts, so that the seal says what was to be saved. `Pending.write` then needs no other
    rank: a callback of the save may call it.

    Args:
        tag: distinguishes this seal from all others of the job; the same on all ranks.
        step: is written into the seal.
        ignore: patterns of keys that are not sealed, besides `api.UNEQUAL`.
        resolve_stateful: whether `state_dict()` of the values is called, as DCP does.

    Raises:
        LiveNotInstalled: the job has several ranks and `install` was not called.
    """
    if api.is_off():
        return Pending("", step)
    live = api.installed()
    outcome = _measured(live, state_dict, f"seal {api.name_of(tag)}", ignore, resolve_stateful, lambda sums: sums)
    if isinstance(outcome, str):
        return Pending(outcome, step, _is_writer=live.group.rank == 0)
    return Pending("", step, outcome[0], live.group.rank == 0)


def seal(
    state_dict: Mapping[Any, Any], path: str | Path, *, step: int | None = None, ignore: Iterable[str] = ()
) -> Path | None:
    """Seal a checkpoint that was just saved from this state; on all ranks.

    Returns, raises: as `prepare_seal` and `Pending.write`; what rank 0 raises while it writes, all ranks raise.
    """
    pending = prepare_seal(state_dict, tag=path, step=step, ignore=ignore)
    written, error, failure = None, None, ""
    try:
        written = pending.write(path)
    except Exception as raised:
        error, failure = raised, str(raised) if isinstance(raised, CkptlintError) else api.text_of(raised)
    if api.is_off() or pending.problem:
        return written
    if reason := api.installed().end_alike(f"seal {api.name_of(path)}", failure):
        raise error or CkptlintError(reason)
    if failure:  # the others did not wait so long
        api.warn(lambda: f"the checkpoint was not sealed: {failure}")
    return written


def check_loaded(
    state_dict: Mapping[Any, Any],
    path: str | Path,
    *,
    on_error: api.OnError = "raise",
    ignore: Iterable[str] = (),
    resolve_stateful: bool = True,
) -> Report:
    """Compare what the ranks loaded with the seal of the checkpoint, in whatever layout; on all ranks, after the load.

    Args:
        state_dict: what was given to the load.
        path: the folder of the checkpoint; rank 0 reads the seal in it.
        on_error: what to do about an error: raise LiveError on all ranks, or warn.
        ignore: patterns of keys that are not compared, besides `api.UNEQUAL`.

    Returns:
        The report, the same on all ranks: LIV304 where values differ, LIV205 where copies differ from each other,
            LIV213 for what was not compared.

    Raises:
        LiveError: an error.
        LiveNotInstalled: the job has several ranks and `install` was not called.
    """
    if api.is_off():
        return api.judge_ranks(protocol.no_table(1), "state dict", 0.0)
    live = api.installed()
    name, tag = f"state dict loaded from {path}", f"loaded {api.name_of(path)}"
    outcome = _measured(
        live, state_dict, tag, ignore, resolve_stateful, lambda sums: _against(live, sums, Path(path)), True
    )
    if isinstance(outcome, str):
        table, seconds = protocol.voided(live.group.world, "LIV211", outcome), 0.0
    else:
        table, seconds = outcome[1].table, outcome[1].seconds
        table = replace(table, findings=(*table.findings, *outcome[0]))
    report = api.judge_ranks(table, name, seconds)
    if report.fails and on_error != "warn" and live.all_raise(tag, True):
        raise api.LiveError(report, api.text_for(report, live.group.rank))
    if report.fails or report.is_incomplete:
        api.warn(lambda: api.text_for(report, live.group.rank))
    return report


# ---------------------------------------------------------------- measuring


def _measured(
    live: api.Live,
    state_dict: Mapping[Any, Any],
    tag: str,
    ignore: Iterable[str],
    resolve_stateful: bool,
    then: Callable[[_Sums], _T],
    compares_copies: bool = False,
) -> tuple[_T, protocol.Outcome] | str:
    """What `then` makes of the sums while the ranks are together; why there are none, the same on all that are here.

    With `compares_copies` the copies of each chunk are compared with each other: the sums are of one of them.
    """
    rows, local = _local(live, state_dict, tag, ignore, resolve_stateful, compares_copies)

    def measured() -> tuple[_T, protocol.Outcome] | str:
        # a memory of its own: this is no check that the next one is to be compared with
        memory = protocol.Memory(cells=live.memory.cells, salt=live.memory.salt)
        outcome = protocol.exchange(live.group, local, memory)
        report = api.judge_ranks(outcome.table, "state dict", 0.0)
        if report.is_incomplete:
            return "; ".join(item.title for item in report.diagnostics)
        if outcome.common is None:
            return "there are too many keys for one check"
        torn = frozenset(
            item.fqn for item in report.diagnostics if item.severity == Severity.ERROR and item.fqn is not None
        )
        return then(_summed(live, rows, outcome.common.key, memory.salt, torn)), outcome

    result = live.together(measured, tag, True, local.error)
    api.raise_foreign(local.error)
    return result.text if isinstance(result, api.Absence) else result


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What this rank holds; row i is one chunk or object.

    Attributes:
        fqns: [m]; seed: [m]; reason: [m]; as in `_Sums`.
        digest: uint64 [m]; count: int64 [m], elements that it is of: 0 for copies that another rank owns.
        undeclared: bool [m], nobody declared who writes it.
    """

    fqns: list[str]
    seed: list[int]
    reason: IntArray
    digest: Words
    count: IntArray
    undeclared: np.ndarray[Any, np.dtype[np.bool_]]


def _local(
    live: api.Live,
    state_dict: Mapping[Any, Any],
    tag: str,
    ignore: Iterable[str],
    resolves: bool,
    compares_copies: bool,
) -> tuple[_Rows, protocol.RankInput]:
    """The local phase: everything that can fail, before any other rank is waited for."""
    try:
        from ckptlint.live.collect.extract import extract, findings_of

        patterns = api.checked_options({"ignore": ignore})["ignore"]
        asked = ALGORITHM, patterns, resolves, compares_copies
        settings = api._short_hash((protocol.VERSION, __version__, *asked))
        limit = live.limit()
        rank_chunks = extract(state_dict, resolve_stateful=resolves, limit=limit)
        digests, has_digests, _ = api._digests(rank_chunks, patterns, compares_copies, limit)
        digests[[item.kind == "object" for item in rank_chunks]] = 0  # a seal is of tensors alone
        records = fp.chunk_rows(rank_chunks, digests, live.keys)
        findings = findings_of(rank_chunks, live.group.rank)
        unlike = {finding.fqn for finding in findings}
        records.flawed[:] = [fqn in unlike for fqn in records.fqns]
        rows = _rows(rank_chunks, _short_seeds(records), patterns)
        late = functools.partial(api._late_digests, rank_chunks, patterns) if compares_copies else None
        contents = [item.data for item in rank_chunks] if compares_copies else ()
        local = protocol.RankInput(records, tuple(findings), settings, api._short_hash(tag), has_digests=has_digests)
        return rows, replace(local, contents=contents, late_digests=late)
    except BaseException as error:
        return _rows([], [], ()), live.failed(error, tag)


def _rows(rank_chunks: Sequence[Any], seeds: list[int], patterns: Sequence[str]) -> _Rows:
    """What a seal needs of each chunk here: digest and elements, or the reason why it has none."""
    import torch

    from ckptlint.live.collect.tensor_digest import Chunk, elem_digests, freed_bytes

    reason = np.zeros(len(rank_chunks), np.int64)
    digest, count = np.zeros(len(rank_chunks), np.uint64), np.zeros(len(rank_chunks), np.int64)
    chosen, is_unequal = [], api._unequal(patterns)
    for i, item in enumerate(rank_chunks):
        if is_unequal(item.fqn, item.data):
            reason[i] = _IGNORED
        elif item.kind == "object":
            reason[i] = _OBJECT
        elif item.replica <= 0 and isinstance(item.data, torch.Tensor):
            chosen.append(i)
    is_read = readable([rank_chunks[i].data for i in chosen])
    reason[np.array(chosen, np.int64)[~is_read]] = _NO_DIGEST
    chosen = [i for i, reads in zip(chosen, is_read, strict=True) if reads]
    try:
        items = [rank_chunks[i] for i in chosen]
        digests, known = elem_digests([Chunk(item.data, item.offsets, item.sizes, item.shape) for item in items])
        digest[chosen] = digests.view(np.uint64)
        count[chosen] = [int(np.prod(item.sizes, dtype=object)) for item in items]
        freed = [freed_bytes(item.data) is not None for item in items]
        reason[chosen] = np.where(known, 0, np.where(freed, _FREED, _NO_DIGEST))
    except torch.OutOfMemoryError:
        reason[chosen] = _NO_MEMORY
    undeclared = np.array([item.replica < 0 for item in rank_chunks], bool)
    return _Rows([item.fqn for item in rank_chunks], seeds, reason, digest, count, undeclared)


def _summed(live: api.Live, rows: _Rows, key: Words, salt: int, torn: frozenset[str]) -> _Sums:
    """Two reductions, of 32 and then 32 bytes for each key."""
    group = live.group
    at = np.searchsorted(key, fp.numbers(rows.fqns, salt)) if rows.fqns else np.zeros(0, np.int64)
    table = np.full((4, len(key)), _NOWHERE, np.int64)
    seeds = np.array(rows.seed, np.int64)
    lowest = np.where(rows.undeclared, group.world - group.rank, 0)
    for fact, values in zip(table, (lowest, seeds, -seeds, rows.reason), strict=True):
        np.maximum.at(fact, at, values)
    lowest, seed, counter, reason = group.reduce(table.reshape(-1), "max").reshape(table.shape)
    is_first = ~rows.undeclared | (lowest[at] == group.world - group.rank)
    sums = np.zeros((len(key), 2, 2), np.uint64)
    for column, chosen in enumerate((np.ones(len(at), bool), is_first)):
        np.add.at(sums[:, column, 0], at[chosen], rows.digest[chosen])
        np.add.at(sums[:, column, 1], at[chosen], rows.count[chosen].astype(np.uint64))
    total = group.reduce(sums.reshape(-1).view(np.int64), "sum").view(np.uint64).reshape(sums.shape)
    seed = np.where(seed == -counter, seed, -1)  # ranks that disagree fit no description
    return _Sums(key, salt, seed, reason, total[:, :, 0], total[:, :, 1].view(np.int64), np.unique(at), torn)


# ---------------------------------------------------------------- comparing with a seal


def _against(live: api.Live, sums: _Sums, path: Path) -> list[RankFinding]:
    """What the seal says of the sums: rank 0 reads it and sends the others what it says of their keys."""
    count = len(sums.key)
    words = np.zeros(_TEXT_WORDS + 1 + 3 * count, np.int64)
    names: list[str] = [""] * count
    if live.group.rank == 0:
        names = _fill(words, sums, path)
    words = live.group.broadcast(words, 0)
    text = words[:_TEXT_WORDS].tobytes().rstrip(b"\0").decode("utf-8", "ignore")
    if text:
        return [RankFinding(-1, "", "LIV211", f"nothing was compared with the seal: {text}", voids="check")]
    left = Counter({"not in the state": int(words[_TEXT_WORDS])})
    volumes, digests, seeds = words[_TEXT_WORDS + 1 :].reshape(3, count)
    different: dict[int, int] = {}
    compared = 0
    for row, volume in enumerate(volumes.tolist()):
        reason = _REASONS.get(int(sums.reason[row]), "")
        if volume < 0:
            left[reason or "not sealed"] += sums.reason[row] != _OBJECT
        elif reason or sums.seed[row] != seeds[row]:
            left[reason or _UNLIKE] += 1
        elif (digest := sums.digest(row, volume)) is None:
            left[_OWNERS] += 1
        else:
            compared += 1
            if digest != int(digests[row]) & MASK:
                different[row] = digest
    if not compared:
        reasons = "; ".join(f"{plural(number, 'key')} {why}" for why, number in left.items() if number)
        text = f"nothing was compared with the seal: {reasons or 'it has no keys'}"
        return [RankFinding(-1, "", "LIV211", text, voids="check")]
    counted = {why: f"{number:,} key{'s were' if number > 1 else ' was'}" for why, number in left.items() if number}
    findings = [
        RankFinding(-1, "", "LIV213", f"{number} not compared with the seal: {why}") for why, number in counted.items()
    ]
    return findings + (_differing(live, sums, names, digests, different) if different else [])


def _fill(words: IntArray, sums: _Sums, path: Path) -> list[str]:
    """Write into the words what the seal says, or why it says nothing; returns the names of the keys."""
    names = [""] * len(sums.key)
    try:
        folder = LocalFolder(path)
        sealed = read_seal(folder)
        reason = f"there is no {SEAL} in {path}" if sealed is None else misfit_of(sealed, metadata_hash(folder))
    except UnreadableError as error:
        sealed, reason = None, f"{SEAL} {error}"
    except CkptlintError as error:
        sealed, reason = None, str(error)
    except Exception as error:  # the other ranks wait for this one
        sealed, reason = None, f"{type(error).__name__}: {error}"
    if reason or sealed is None:
        data = reason.encode("utf-8", "backslashreplace")[: 8 * _TEXT_WORDS].ljust(8 * _TEXT_WORDS, b"\0")
        words[:_TEXT_WORDS] = np.frombuffer(data, np.int64)
        return names
    volumes, digests, seeds = words[_TEXT_WORDS + 1 :].reshape(3, len(sums.key))
    volumes[:] = -1
    places = sums.places(list(sealed.entries))
    words[_TEXT_WORDS] = places.count(-1)
    for (fqn, entry), row, seed in zip(sealed.entries.items(), places, _seeds(sealed.entries), strict=True):
        if row >= 0:
            names[row] = fqn
            volumes[row] = int(np.prod(entry.shape, dtype=object))
            digests[row] = np.array([entry.digest], np.uint64).view(np.int64)[0]
            seeds[row] = seed
    return names


def _differing(
    live: api.Live, sums: _Sums, names: Sequence[str], sealed: IntArray, different: Mapping[int, int]
) -> list[RankFinding]:
    """One finding for each rank that holds a key whose values differ (row -> digest); all learn its name, and who."""
    rows = list(different)[:_NAMED]
    holds = live.group.gather(np.isin(rows, sums.positions).astype(np.int64)).astype(bool)
    text = "\n".join(names[row] for row in rows).encode("utf-8", "backslashreplace")
    length = int(live.group.broadcast(np.array([len(text)], np.int64), 0)[0])
    padded = np.frombuffer(text[:length].ljust(-(-length // 8) * 8, b"\0"), np.int64)
    differing = live.group.broadcast(padded, 0).tobytes()[:length].decode().split("\n")
    findings = []
    for place, (row, fqn) in enumerate(zip(rows, differing, strict=True)):
        sentence = f"the loaded values{{of}} differ from those that the job sealed: digest {different[row]:016x}, "
        sentence += f"sealed {int(sealed[row]) & MASK:016x}"
        findings += [RankFinding(rank, fqn, "LIV304", sentence) for rank in np.flatnonzero(holds[:, place]).tolist()]
    if more := len(different) - len(rows):
        sentence = f"the loaded values of {more:,} more keys differ from the sealed ones"
        findings.append(RankFinding(-1, "", "LIV304", sentence))
    return findings
