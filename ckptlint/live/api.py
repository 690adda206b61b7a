"""The entry points for a job: `install` once, `check` before each save."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from ckptlint._version import __version__
from ckptlint.analysis.ranks.rank_chunks import as_checkpoint, with_alike
from ckptlint.depth import Depth
from ckptlint.errors import CheckpointError, CkptlintError
from ckptlint.formats.pickles.safe_pickle import paused_gc
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import Report
from ckptlint.live.collect.limit import Limit, OutOfTime, readable
from ckptlint.live.compare import fingerprints as fp
from ckptlint.live.compare import protocol
from ckptlint.live.compare.gate import Gate, aside
from ckptlint.live.compare.group import GroupBroken, RankGroup, Solo, TorchGroup, new_torch_group
from ckptlint.model import RankFinding, RankTable
from ckptlint.model.text import named_ranks, plural, printable, shape_text, texts
from ckptlint.model.tiling import BoolArray, IntArray
from ckptlint.rule import Severity
from ckptlint.seals.digests import Words

_T = TypeVar("_T")

OnError = Literal["raise", "warn"]
Digest = Literal["replicas", "none"]
Backend = Literal["auto", "gloo", "nccl"]
Expect = Iterable[str] | Mapping[str, tuple[Sequence[int] | None, str | None]]
State = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]
"""A state dict, or the function that makes it."""

UNEQUAL = (
    "rng_states?",
    "extra_states?",
    "amax",
    "dataloaders?",
    "dataset_states?",
    "running_(mean|var)$",  # of batch norm: each rank's own data
    "tokens_per_expert",
    r"(?<=\.)((local|global|node)_)?rank$",  # in the arguments of a job
)
"""Whole words, as regular expressions, of keys whose contents differ between ranks by design: they are described to the
others, not compared. Random states are known by what they are, too."""

REFUSED = "Nothing was written."
"""Ends the text of an error that is raised before a save."""

_TIMEOUT = 60.0
_COLLECTING = 0.6  # of the timeout; what follows on the last value takes no longer than the rest
_TAG_LIMIT = 1000  # characters of a tag that are shown as they are; a store takes keys of megabytes badly


class LiveNotInstalled(CkptlintError):  # noqa: N818  what is the case
    """`check` was called in a job of several ranks in which `install` was not."""


class LiveError(CheckpointError):
    """The state is not fit to be saved; raised on all ranks.

    The text on rank 0 is the whole report, on each other rank one line.

    Attributes:
        report: what was found; the same on all ranks.
    """

    def __init__(self, report: Report, text: str) -> None:
        super().__init__(text)
        self.report = report

    def __reduce__(self) -> tuple[type[LiveError], tuple[Report, str]]:
        return LiveError, (self.report, str(self))


class Absence(NamedTuple):
    """Why nothing was compared.

    Attributes:
        first: the lowest rank that came: it prints.
        is_shared: whether all ranks that came know it, and not this one alone.
    """

    text: str
    first: int = 0
    is_shared: bool = True


@dataclass(slots=True, eq=False)
class Live:
    """Live mode of one job, or of one rank of a test.

    Attributes:
        group: of all ranks, used by nothing else.
        gate: decides whether all ranks are here; None for a job of one rank.
        timeout: seconds that the gate, and then the collectives, may take.
        refusal: why nothing can be compared in this job; "" normally.
    """

    group: RankGroup
    gate: Gate | None
    timeout: float = _TIMEOUT
    refusal: str = ""
    memory: protocol.Memory = field(default_factory=protocol.Memory)
    keys: dict[str, int] = field(default_factory=dict)
    ends: Gate | None = field(default=None, init=False)  # where ranks that end alike meet after the work

    def __post_init__(self) -> None:
        if self.gate is not None:
            self.ends = Gate(self.gate.store, self.gate.rank, self.gate.world, f"{self.gate.name}/end")

    def __repr__(self) -> str:
        return f"<Live: {self.refusal or 'on, ' + plural(self.group.world, 'rank')}>"

    def __reduce__(self) -> tuple[Callable[[], Live], tuple[()]]:
        """A copy is the live mode of the process that it is made in: a process group cannot travel."""
        return installed, ()

    def check(
        self,
        state_dict: State,
        *,
        tag: object = None,
        digest: Digest = "replicas",
        on_error: OnError = "raise",
        on_incomplete: OnError = "warn",
        ignore: Iterable[str] = (),
        expect: Expect | None = None,
        resolve_stateful: bool = True,
        repeats: bool = False,
    ) -> Report:
        """As the function of this module; a state that is yet to be made may fail on a rank as any other."""
        name = "" if tag is None else name_of(tag)
        started = time.monotonic()
        options = {"digest": digest, "on_error": on_error, "on_incomplete": on_incomplete}
        local = self._input(state_dict, name, options | {"ignore": ignore, "expect": expect}, resolve_stateful)
        local = replace(local, milliseconds=int((time.monotonic() - started) * 1000))
        path = f"state dict {name}".rstrip()

        def compared() -> Report:
            outcome = protocol.exchange(self.group, local, self.memory)
            report = judge_ranks(outcome.table, path, outcome.seconds)
            if len(outcome.table) and not any(report.diagnostics):
                # two keys of one number looked like a fault; under another salt they will not
                self.memory.salt += 1
                self.memory.reference = None
            return report

        report = self.together(compared, name, repeats or tag is None, local.error)
        if isinstance(report, Absence):
            raise_foreign(local.error)
            return self._incomplete(path, report, on_incomplete)
        all_raise = report.fails and on_error != "warn" and self.all_raise(name, repeats or tag is None)
        raise_foreign(local.error)
        if all_raise:
            raise LiveError(report, text_for(report, self.group.rank, REFUSED)) from local.error
        if self.group.rank == 0:
            if any(item.severity >= Severity.WARNING for item in report.diagnostics):
                warn(lambda: as_text(report), stacklevel=3)
            else:
                announce(self.group.world)
        return report

    def give_up(self, error: GroupBroken) -> str:
        """From now on nothing is compared in this job; returns the sentence that says so."""
        self.refusal = f"live mode is off for the rest of this job: {error}"
        return self.refusal

    def _input(
        self, state_dict: State, tag: str, options: Mapping[str, Any], resolve_stateful: bool
    ) -> protocol.RankInput:
        """The local phase: everything that can fail, before any other rank is waited for."""
        try:
            from ckptlint.live.collect.extract import extract, findings_of, resolved

            options = checked_options(options)
            digest, patterns, expect = options["digest"], options["ignore"], options["expect"]
            asked = digest, options["on_error"], options["on_incomplete"], patterns, expect, resolve_stateful
            settings = _short_hash((protocol.VERSION, __version__, *asked))
            state = state_dict if isinstance(state_dict, Mapping) else state_dict()
            limit = self.limit()
            state = dict(resolved(state, limit)) if resolve_stateful else state
            with paused_gc():
                rank_chunks = extract(state, resolve_stateful=False, limit=limit)
                digests, has_digests, uncompared = _digests(rank_chunks, patterns, digest == "replicas", limit)
                rows = fp.chunk_rows(rank_chunks, digests, self.keys)
                findings = findings_of(rank_chunks, self.group.rank)
                findings += _against(rank_chunks, expect, self.group.rank) if expect else []
                unlike = {finding.fqn for finding in findings}
                rows.flawed[:] = [fqn in unlike for fqn in rows.fqns]
            return protocol.RankInput(
                rows,
                tuple(findings),
                settings,
                _short_hash(tag),
                has_digests=has_digests,
                uncompared=uncompared,
                contents=[item.data for item in rank_chunks] if digest == "replicas" else (),
                expect=expect,
                late_digests=functools.partial(_late_digests, rank_chunks, patterns) if digest == "replicas" else None,
            )
        except BaseException as error:
            return self.failed(error, tag)

    def failed(self, error: BaseException, tag: str) -> protocol.RankInput:
        """What a rank brings whose local phase raised: the others are told, and do not wait for it."""
        text = text_of(error)
        where = traceback.extract_tb(error.__traceback__)[-1:]
        reason = f"{text} ({Path(where[0].filename).name}:{where[0].lineno})" if where else text
        none = fp.chunk_rows([], [], self.keys)
        return protocol.RankInput(none, (), 0, _short_hash(tag), failure=reason, error=error)

    def limit(self) -> Limit:
        """For a rank that begins to collect: it ends before the others give it up, so that they are told why."""
        return Limit(self.timeout * _COLLECTING)

    def together(self, work: Callable[[], _T], tag: str, repeats: bool, failure: BaseException | None) -> _T | Absence:
        """What all ranks work out, by collectives, once all are here and no other check of the job runs; or why not."""
        refusal = self.refusal or (str(failure) if isinstance(failure, OutOfTime) else "")
        gate = self.gate
        if gate is None:
            return Absence(refusal) if refusal else work()
        # a rank that gave up says so at the gate: others may not know, and would wait for it
        veto, is_main = refusal or _veto(), threading.current_thread() is threading.main_thread()
        stream = _stream()

        def pass_and_work() -> _T | Absence:
            try:
                passage = gate.enter(tag, self.timeout, veto, repeats, is_main)
                if not passage.go:
                    first = min(set(range(self.group.world)) - set(passage.absent))
                    absent = f"{named_ranks(passage.absent)} did not come within {self.timeout:g} s"
                    return Absence(f"nothing was compared: {passage.reason or absent}", first)
                with gate.in_turn(passage, self.timeout), stream:
                    self.group.begin(self.timeout)
                    return work()
            except GroupBroken as error:
                return Absence(self.give_up(error), is_shared=False)

        return aside(pass_and_work)

    def end_alike(self, tag: str, failure: str) -> str:
        """What one rank failed in after the work, on all ranks that came in time; "" where none did."""
        with suppress(GroupBroken):
            return self.ends.enter(tag, self.timeout, failure, repeats=True).reason if self.ends else failure
        return ""

    def all_raise(self, tag: str, repeats: bool) -> bool:
        """Whether all ranks have come to the same end: one that lost the others would walk into the save alone."""
        if self.ends is None:
            return True
        try:
            return self.ends.enter(tag, self.timeout, repeats=repeats).go
        except GroupBroken as error:  # others may raise, and this rank knows why
            self.give_up(error)
            return True

    def _incomplete(self, path: str, absence: Absence, how: OnError) -> Report:
        report = judge_ranks(protocol.voided(self.group.world, "LIV211", absence.text), path, 0.0)
        if how == "raise" and absence.is_shared:
            raise LiveError(report, text_for(report, self.group.rank, REFUSED, absence.first))
        warn(lambda: text_for(report, self.group.rank, first=absence.first), stacklevel=4)
        return report


_installed: Live | None = None
_is_announced = False


def install(*, timeout: float = _TIMEOUT, backend: Backend = "auto", max_ctas: int = 1) -> Live:
    """Make the one process group of live mode: once, on all ranks, right after `init_process_group`.

    Without torch.distributed, or in a job of one rank, no group is made and everything works.

    Args:
        timeout: seconds that a check waits for ranks and for its collectives.
        backend: `auto` takes NCCL where all ranks have a GPU of their own and the job uses NCCL, gloo otherwise.
        max_ctas: blocks of the GPU that NCCL may take for it.

    Raises:
        LiveNotInstalled: not all ranks came, so there is no group; or a launcher started several ranks, and
            `init_process_group` was not called yet.
        GroupBroken: the group could not reduce.
        ValueError: an option has a value that it cannot have.
    """
    global _installed
    _one_of("backend", backend, Backend)
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}, and has to be more than 0 seconds")
    if _installed is None or _is_outgrown(_installed):
        _installed = _live(timeout, backend, max_ctas)
    return _installed


def _is_outgrown(live: Live) -> bool:
    """Whether `init_process_group` made another group since: this process was alone, or that group is gone."""
    if isinstance(live.group, TorchGroup):
        return not live.group.is_alive()
    return live.gate is None and not live.refusal and rank_and_world()[1] > 1


def uninstall() -> None:
    """Forget the group, as before `destroy_process_group`; not collective."""
    global _installed, _is_announced
    _installed, _is_announced = None, False


def _live(timeout: float, backend: str, max_ctas: int) -> Live:
    """Join the ranks of this job into a group for checks of their own, on CPU or GPU as the job is."""
    import torch.distributed as dist

    if rank_and_world()[1] == 1:
        started = os.environ.get("WORLD_SIZE", "1")
        if started.isdecimal() and int(started) > 1 and not (dist.is_available() and dist.is_initialized()):
            raise LiveNotInstalled(
                f"a launcher started {started} ranks (WORLD_SIZE), and they do not know each other yet: "
                "call ckptlint.live.install() right after init_process_group"
            )
        return Live(Solo(), None, timeout)
    from torch.distributed.distributed_c10d import _get_default_store

    if "fake" in str(dist.get_backend()):
        return Live(Solo(), None, timeout, "nothing can be compared: the process group is the fake one")
    store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
    if hasattr(store, "clone"):  # torch 2.13: a connection of its own, so that no lock is shared with c10d's threads
        store = store.clone()
    passage = Gate(store, rank, world, "install").enter("", timeout, repeats=True)
    if not passage.go:
        raise LiveNotInstalled(f"{named_ranks(passage.absent)} did not call live.install within {timeout:g} s")
    base = f"ckptlint/install/{passage.turn}"  # keys of its own: a store outlives an installation
    if not _can_nccl(backend):
        store.add(f"{base}/without", 1)
    elif store.add(f"{base}/device/{_device_name()}", 1) > 1:
        store.add(f"{base}/without", 1)  # two ranks on one GPU: NCCL refuses them
    if not Gate(store, rank, world, f"installed {passage.turn}").enter("", timeout).go:
        raise LiveNotInstalled(f"a rank was lost in live.install within {timeout:g} s")
    gate = Gate(store, rank, world, f"check {passage.turn}")
    chosen = "gloo" if store.add(f"{base}/without", 0) else "nccl"
    if chosen == "gloo" and rank == 0 and _can_nccl(backend):
        warn(lambda: "live mode uses gloo: a rank has no GPU of its own, or no NCCL", stacklevel=3)
    return Live(new_torch_group(chosen, timeout, max_ctas), gate, timeout)


def rank_and_world() -> tuple[int, int]:
    """Rank and number of ranks; (0, 1) without torch.distributed."""
    import torch.distributed as dist

    is_job = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_job else (0, 1)


def _can_nccl(backend: str) -> bool:
    import torch
    import torch.distributed as dist

    if backend == "gloo" or not torch.cuda.is_available() or not dist.is_nccl_available():
        return False
    return backend == "nccl" or "nccl" in str(dist.get_backend())


def _device_name() -> str:
    import socket

    import torch

    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def check(
    state_dict: Mapping[Any, Any],
    *,
    tag: object = None,
    digest: Digest = "replicas",
    on_error: OnError = "raise",
    on_incomplete: OnError = "warn",
    ignore: Iterable[str] = (),
    expect: Expect | None = None,
    resolve_stateful: bool = True,
) -> Report:
    """Compare what all ranks are about to save; call it on all of them, before `dcp.save` or `async_save`.

    With CKPTLINT_LIVE=0 in the environment it does nothing.

    Args:
        state_dict: what you give to the save.
        tag: distinguishes this check from all others of the job (the step, a path); the same on all ranks.
        digest: `replicas` compares the contents of copies too, `none` only shapes and offsets.
        on_error: on an error, raise LiveError on all ranks, or warn on rank 0. Of lesser findings rank 0 warns.
        on_incomplete: the same where ranks are missing.
        ignore: patterns of keys whose contents differ by design, besides `UNEQUAL`.
        expect: the keys that must be held and no others, with (global shape, dtype) where known; the same on all ranks.
        resolve_stateful: whether to call `state_dict()` of the values, as DCP does.

    Returns:
        The report, the same on all ranks. Rank 0 prints it if it found something; the first check that finds nothing
        prints one line.

    Raises:
        LiveError: an error; with `on_incomplete="raise"` also a check that could not compare.
        LiveNotInstalled: the job has several ranks and `install` was not called.
    """
    if is_off():
        return judge_ranks(protocol.no_table(1), "state dict", 0.0)
    return installed().check(
        state_dict,
        tag=tag,
        digest=digest,
        on_error=on_error,
        on_incomplete=on_incomplete,
        ignore=ignore,
        expect=expect,
        resolve_stateful=resolve_stateful,
    )


_CHOICES = {"digest": Digest, "on_error": OnError, "on_incomplete": OnError}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `check` for a hook that calls it again and again: none is used up by the first call.

    Raises:
        TypeError: `check` has no such option, or a hook sets it itself.
        ValueError: an option has a value that it cannot have.
    """
    if unknown := sorted(options.keys() - _CHOICES.keys() - {"ignore", "expect"}):
        raise TypeError(f"{unknown[0]} is no option here: {', '.join((*_CHOICES, 'ignore', 'expect'))}")
    for name in options.keys() & _CHOICES.keys():
        _one_of(name, options[name], _CHOICES[name])
    kept = dict(options)
    if "ignore" in options:
        kept["ignore"] = texts(options["ignore"])
        _unequal(kept["ignore"])
    if "expect" in options:
        kept["expect"] = _expected(options["expect"])
    return kept


def _one_of(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}, and has to be {' or '.join(map(repr, get_args(choices)))}")


def is_off() -> bool:
    """Whether CKPTLINT_LIVE=0 turns live mode off."""
    return os.environ.get("CKPTLINT_LIVE") == "0"


def installed() -> Live:
    """The live mode of this job, made on the way for one rank; raises LiveNotInstalled where several have none."""
    if _installed is not None and not _is_outgrown(_installed):
        return _installed
    if rank_and_world()[1] > 1:
        raise LiveNotInstalled("call ckptlint.live.install() on all ranks, right after init_process_group")
    return install()


# ---------------------------------------------------------------- the verdict


@paused_gc()
def judge_ranks(table: RankTable, path: str, seconds: float) -> Report:
    """The report on what ranks hold: the same words, severities and formats as for files."""
    rules = tuple(rule for rule in load_rules() if rule.live)
    part = run_rules(as_checkpoint(table, path), rules, Depth.METADATA)
    part.diagnostics[:] = [replace(item, finding=with_alike(item.finding, table)) for item in part.diagnostics]
    part.seconds.clear()  # they differ between ranks, and the report must not
    return Report([part], rules, Depth.METADATA, seconds=seconds)


def as_text(report: Report) -> str:
    """The report as text, at 100 columns."""
    from ckptlint.reporters import REPORTERS
    from ckptlint.reporters.style import Style

    return REPORTERS["full"](report, Style(width=100))


def text_for(report: Report, rank: int, end: str = "", first: int = 0) -> str:
    """What a rank prints of a report that is the same on all: the first all of it, others a line; then the end."""
    if rank == first:
        return as_text(report) + (f"{end}\n" if end else "")
    from ckptlint.model.text import inert
    from ckptlint.reporters.style import cut_names

    groups = [group for part in report.checkpoints for group in part.groups]
    lead = groups[0].lead
    more = f" ({plural(len(groups) - 1, 'more finding')})" if len(groups) > 1 else ""
    what = f"{lead.code} {cut_names(lead.title, lead.fqn)}{more}."
    return " ".join(filter(None, ["ckptlint live:", inert(what), end, f"Rank {first} prints the report."]))


def announce(world: int) -> None:
    """Say once, on the rank that calls, that live mode is on: a healthy check says nothing else."""
    global _is_announced
    if not _is_announced:
        _is_announced = True
        _print(f"ckptlint live: on, {plural(world, 'rank')}")


def warn(text: Callable[[], str], stacklevel: int = 2) -> None:
    """Warn, or print where warnings are errors; raises nothing, since the other ranks go on."""
    with suppress(Exception):  # a hook that shows warnings, or a report that has no text
        said = text()
        try:
            warnings.warn(said, stacklevel=stacklevel + 1)
        except Warning:
            _print(said)


def _print(text: str) -> None:
    with suppress(Exception):  # stderr is full, closed or None
        sys.stderr.write(f"{text}\n")


# ---------------------------------------------------------------- the local phase


def _digests(
    rank_chunks: Sequence[Any], patterns: Sequence[str], with_contents: bool, limit: Limit
) -> tuple[Words, bool, list[str]]:
    """uint64 [n], digest of each row's contents (0 for none); whether there was memory; keys that are left out."""
    import torch

    from ckptlint.live.collect.tensor_digest import live_object_digest

    out = np.zeros(len(rank_chunks), np.uint64)
    if not with_contents:
        return out, True, []
    is_unequal = _unequal(patterns)
    # what placements give to one rank alone is hashed if others turn out to hold it (`_late_digests`)
    shared = [i for i, item in enumerate(rank_chunks) if item.copies != 1]
    compared = [i for i in shared if not is_unequal(rank_chunks[i].fqn, rank_chunks[i].data)]
    tensors = [i for i in compared if rank_chunks[i].kind == "tensor" and isinstance(rank_chunks[i].data, torch.Tensor)]
    meta = {i for i, item in enumerate(rank_chunks) if isinstance(item.data, torch.Tensor) and item.data.is_meta}
    left = ({*shared} - {*compared}) | meta
    started = time.monotonic()
    try:
        out[tensors], known = _tensor_digests([rank_chunks[i].data for i in tensors])
    except torch.OutOfMemoryError:
        return out, False, []
    limit.extend(time.monotonic() - started)  # it grows with memory that is there, much alike on all ranks
    left |= {i for i, is_known in zip(tensors, known, strict=True) if not is_known}
    for i in (i for i in compared if rank_chunks[i].kind == "object"):
        value = rank_chunks[i].data
        if type(value) is argparse.Namespace:
            items = vars(value).items()
            value = {name: option for name, option in items if not is_unequal(f"{rank_chunks[i].fqn}.{name}", option)}
        digest = live_object_digest(value, limit)
        out[i] = 0 if digest is None else digest or 1
        left |= {i} if digest is None else set()
    return out, True, [*dict.fromkeys(rank_chunks[i].fqn for i in sorted(left))]


def _late_digests(rank_chunks: Sequence[Any], patterns: Sequence[str], rows: IntArray) -> Words:
    """uint64 [k], digests of tensors that others hold too although no placement says so; 0 for none.

    Raises nothing: the others are in the middle of the check, and without digests they are told that nothing was
    compared.
    """
    import torch

    out = np.zeros(len(rows), np.uint64)
    is_unequal = _unequal(patterns)
    chunks = [(i, rank_chunks[row]) for i, row in enumerate(rows.tolist())]
    compared = {i: c.data for i, c in chunks if isinstance(c.data, torch.Tensor) and not is_unequal(c.fqn, c.data)}
    with suppress(Exception):
        out[[*compared]], _ = _tensor_digests([*compared.values()])
    return out


def _tensor_digests(data: Sequence[Any]) -> tuple[Words, BoolArray]:
    """uint64 [n], digests, 0 for none; bool [n], whether there is one. Raises torch.OutOfMemoryError."""
    import torch

    from ckptlint.live.collect.tensor_digest import word_digests

    if any(tensor.is_cuda for tensor in data):
        torch.cuda.synchronize()  # other streams may still write what is about to be read
    digests, known = np.zeros(len(data), np.int64), readable(data)
    at = np.flatnonzero(known)
    digests[at], known[at] = word_digests([data[i] for i in at.tolist()])
    return np.where(known, np.maximum(digests.view(np.uint64), np.uint64(1)), np.uint64(0)), known


def _unequal(patterns: Sequence[str]) -> Callable[[str, Any], bool]:
    """Tells of a key and what it holds whether it differs between ranks by design."""
    is_named = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or "(?!)").match
    has_word = re.compile(f"(?<![a-zA-Z])({'|'.join(UNEQUAL)})(?![a-zA-Z])").search
    return lambda fqn, value: bool(is_named(fqn) or has_word(fqn)) or _is_random_state(fqn, value)


def _is_random_state(fqn: str, value: Any) -> bool:
    """Whether a value is what a generator of torch, Python or numpy goes on from."""
    import torch

    if type(value) is torch.Tensor and value.dtype == torch.uint8 and value.ndim == 1:
        # on the CPU and on a GPU
        return len(value) == 5056 or (len(value) == 16 and re.search("(?<![a-zA-Z])rng", fqn) is not None)
    if type(value) is dict:
        return {"bit_generator", "state"} <= value.keys()
    if type(value) is not tuple or not 3 <= len(value) <= 5:
        return False
    return value[0] == "MT19937" or (value[0] == 3 and type(value[1]) is tuple and len(value[1]) == 625)


def _expected(expect: Expect | None) -> dict[str, tuple[Sequence[int] | None, str | None]] | None:
    if expect is None:
        return None
    if isinstance(expect, Mapping):
        return {
            fqn: (None if shape is None else tuple(shape), None if dtype is None else str(dtype).removeprefix("torch."))
            for fqn, (shape, dtype) in sorted(expect.items())
        }
    return dict.fromkeys(sorted(texts(expect)), (None, None))


def _against(rank_chunks: Sequence[Any], expect: Mapping[str, Any], rank: int) -> list[RankFinding]:
    """Rows that have another shape or dtype than expected."""
    findings = []
    for item in rank_chunks:
        shape, dtype = expect.get(item.fqn, (None, None))
        shape, dtype = item.shape if shape is None else shape, item.dtype if dtype is None else dtype
        if (shape, dtype) != (tuple(item.shape), item.dtype):
            wanted = f"{dtype or item.dtype} {shape_text(shape)}"
            text = f"the shape or dtype{{of}} is {item.dtype} {shape_text(item.shape)}, not {wanted} as expected"
            findings.append(RankFinding(rank, item.fqn, "LIV208", text))
    return findings


def raise_foreign(error: BaseException | None) -> None:
    """Raise what is no error of the check but the end of this rank, as KeyboardInterrupt; the others know of it."""
    if error is not None and not isinstance(error, Exception):
        raise error


def text_of(error: BaseException) -> str:
    """Class and text of an exception, which may have none."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def name_of(tag: object) -> str:
    """A tag as text that a store takes as part of a key; of a long one the beginning and a hash. It raises nothing."""
    try:
        text = printable(str(tag))
    except Exception as error:
        text = f"a {type(tag).__name__} without text ({type(error).__name__})"
    return text if len(text) <= _TAG_LIMIT else f"{text[:_TAG_LIMIT]}... ({_short_hash(text):014x})"


def _short_hash(value: object) -> int:
    return fp.hashed(repr(value)) >> 8


def _stream() -> AbstractContextManager[Any]:
    """For another thread: the CUDA device and stream of this one, behind whose work a digest has to wait."""
    import torch

    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(torch.cuda.current_stream()) if is_used else nullcontext()


def _veto() -> str:
    """Why this rank may not enqueue anything now; "" normally."""
    import torch

    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return "its CUDA stream is being captured into a graph" if capturing else ""
