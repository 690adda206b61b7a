"""ckptlint: the linter for saved distributed checkpoints.

>>> import ckptlint
>>> report = ckptlint.check("fixtures/real/fsdp2_4r_hole", select=["GEO"])
>>> report.verdict, report.exit_code
('fail', 1)
>>> for diagnostic in report.diagnostics:
...     print(diagnostic.code, diagnostic.fqn, diagnostic.region)
...     break
GEO004 model.layers.0.feed_forward.w1.weight ((6, 0), (3, 12))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from os import PathLike, fspath

from ckptlint._version import __version__
from ckptlint.errors import (
    AccessError,
    BudgetError,
    CheckpointError,
    CkptlintError,
    ConfigError,
    NothingToCheckError,
    UnknownLayoutError,
)
from ckptlint.shown import Shown

TYPE_CHECKING = False  # as type checkers read it; the typing module takes longer to import than all else here
if TYPE_CHECKING:
    from ckptlint.comparing.differences import Diff
    from ckptlint.comparing.values.compare import Values
    from ckptlint.depth import Depth
    from ckptlint.lint.report import Diagnostic, FailOn, Report
    from ckptlint.lint.settings.request import Purpose, Request
    from ckptlint.lint.steps.retention import Retention
    from ckptlint.lint.steps.trust import Judge, Search
    from ckptlint.model import Checkpoint
    from ckptlint.planning.outcome import Plan

__all__ = [
    "AccessError",
    "BudgetError",
    "Checkpoint",
    "CheckpointError",
    "CkptlintError",
    "ConfigError",
    "Diagnostic",
    "NothingToCheckError",
    "Report",
    "UnknownLayoutError",
    "__version__",
    "check",
    "deletable",
    "diff",
    "explain",
    "latest",
    "load",
    "manifest",
    "plan",
    "show",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> object:
        """The classes of what the functions return, imported once somebody asks: they need numpy."""
        if name in ("Diagnostic", "Report"):
            from ckptlint.lint import report as module
        elif name == "Checkpoint":
            from ckptlint import model as module
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(module, name)


def _views() -> object:
    from ckptlint.reporters import views

    return views


Shown.views = _views


def check(
    *paths: str | PathLike[str],
    depth: Depth | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    severity: Mapping[str, str] | None = None,
    fail_on: FailOn | None = None,
    all_steps: bool | None = None,
    expect: str | PathLike[str] | None = None,
    before: str | PathLike[str] | None = None,
    expect_hashes: str | PathLike[str] | None = None,
    baseline: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    sample: float | None = None,
    seed: int | None = None,
) -> Report:
    """The report on the checkpoints under the paths.

    Prints nothing, and reads neither the environment nor a settings file unless `config` names one. What is bad about
    a checkpoint, or keeps it from being judged, is part of the report.

    >>> check("fixtures/real/fsdp2_4r_hole", ignore=["GEO004", "GEO005"]).verdict
    'pass'
    >>> check("fixtures/real/fsdp2_4r_hole", severity={"GEO004": "warning"}).counts["warning"]
    1
    >>> check("fixtures/nowhere")
    Traceback (most recent call last):
    ckptlint.errors.NothingToCheckError: fixtures/nowhere does not exist
    >>> check("fixtures/real/fsdp2_4r", select=["GEO04"])
    Traceback (most recent call last):
    ckptlint.errors.ConfigError: there is no rule 'GEO04', did you mean GEO004?

    Args:
        depth: `metadata`; `files` to look at payload files too; `headers` to open their records; `data` to read all of
            them; by default `data` where all of it is at most 512 MiB on a local disk; otherwise `files`, and numbers
            drawn from this step and the one before.
        select: codes, names or prefixes of the rules to run; all by default. Here and elsewhere one text stands for
            a list of one.
        ignore: the same, to leave out.
        severity: code or name -> `error`, `warning` or `info`.
        fail_on: the lowest severity that makes `Report.exit_code` 1; `warning` by default.
        all_steps: every step of a run folder, not only the newest.
        expect: what to compare with: a manifest, a safetensors file or index, a model folder, another checkpoint.
        before: the step to compare with, in place of the one before in the run.
        expect_hashes: a list of sha256sum with what the files must hold, at depth `data`.
        baseline: an earlier JSON report, whose findings do not count.
        config: a settings file (docs/reference.md): what it says about checking, where the arguments say nothing;
            plug-ins are then loaded too.
        sample: percent of the records to read at depths `headers` and `data`, chosen at random; all by default.
        seed: of that choice.

    Raises:
        ConfigError: an unknown rule, level or depth, a sample at a lesser depth, a reference, baseline or settings file
            that cannot be used.
        NothingToCheckError: one of the paths holds no checkpoint, or there is no path; its `report` has what was
            found at the others.
    """
    from ckptlint.lint.run import run
    from ckptlint.lint.settings.files import Settings, read_settings
    from ckptlint.lint.settings.request import Request
    from ckptlint.model.text import texts

    if unknown := [path for path in paths if not isinstance(path, (str, bytes, PathLike))]:
        raise TypeError(f"check takes paths one by one, check(*paths), not {type(unknown[0]).__name__}")
    checked = [fspath(path) for path in paths]
    options = {
        "depth": depth,
        "select": texts(select),
        "ignore": texts(ignore),
        "severity": None if severity is None else [f"{rule}={level}" for rule, level in severity.items()],
        "fail-on": fail_on,
        "all-steps": all_steps,
        "expect": None if expect is None else str(expect),
        "before": None if before is None else str(before),
        "expect-hashes": None if expect_hashes is None else str(expect_hashes),
        "baseline": None if baseline is None else str(baseline),
        "sample": sample,
        "seed": seed,
    }
    report = run(Request.of(options, Settings() if config is None else read_settings(str(config), checked), checked))
    if report.not_found or not paths:  # a loop over no diagnostics would take it for a pass
        error = NothingToCheckError("; ".join(report.not_found) or "check was given no path")
        error.report = report
        raise error
    return report


def deletable(
    run: str | PathLike[str],
    keep: int,
    depth: Depth | None = None,
    fail_on: FailOn | None = None,
    config: str | PathLike[str] | None = None,
) -> Retention:
    """Which steps of a run may be deleted, so that its newest whole ones and what something points to stay.

    It deletes nothing. `Retention.paths` are the steps that may go, `Retention.rows` says of each why it stays.

    >>> found = deletable("fixtures/real/frameworks/trackers/older", keep=1)
    >>> found.paths, [row["stays"] for row in found.rows()]
    ((), ['the newest whole step', 'latest_checkpointed_iteration.txt names it'])

    Args:
        keep: how many whole steps must stay, at least 1.
        depth, fail_on, config: as `check` has them; they can make it stricter only. All rules at their own severities,
            at depth `files` at least, decide which steps are whole.

    Raises:
        ConfigError: as `check`; or `keep` is less than 1.
        NothingToCheckError, UnknownLayoutError, AccessError: no step is there, or the folder could not be listed.
    """
    from ckptlint.lint.steps.retention import deletable as judged_run

    if keep < 1:
        raise ConfigError(f"keep is {keep}: at least one whole step must stay")
    _, judge, compare = _judging("delete", run, depth, (), (), fail_on, config)
    return judged_run(str(run), keep, judge, compare)


def latest(
    run: str | PathLike[str],
    require: Iterable[str] = (),
    before: int | None = None,
    depth: Depth | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: FailOn | None = None,
    config: str | PathLike[str] | None = None,
) -> Search:
    """The newest step of a run that passes, and why newer ones do not.

    `Search.path` is None where no step passes, and where one that could not be judged may be a newer good one.

    >>> found = latest("fixtures/real/frameworks/trackers/older")
    >>> found.path, len(found.skipped)
    ('fixtures/real/frameworks/trackers/older/iter_0000020', 0)

    Args:
        require: the parts that the step must hold (`model`, `optimizer`, ...); those of the step before it by default.
        before: only steps below this number.
        depth, select, ignore, fail_on, config: as `check` has them; they decide which steps pass, but an error stays
            one, whatever `config` says. Warnings fail no step unless `fail_on` says so.

    Raises:
        ConfigError: as `check`; there is no such part, or several runs lie there.
        NothingToCheckError, UnknownLayoutError, AccessError: no step is there, or the folder could not be listed.
    """
    from ckptlint.lint.steps.trust import newest_good, runs_at
    from ckptlint.model.text import texts

    _, judge, compare = _judging("resume", run, depth, select, ignore, fail_on, config)
    runs = runs_at(str(run))
    if len(runs) > 1:
        raise ConfigError(f"{run} holds {len(runs)} runs: name one of them ({', '.join(path for path, _ in runs)})")
    ((path, folder),) = runs
    return newest_good(folder, path, judge, texts(require), before, compare)


def _judging(
    purpose: Purpose,
    run: str | PathLike[str],
    depth: Depth | None,
    select: Iterable[str],
    ignore: Iterable[str],
    fail_on: FailOn | None,
    config: str | PathLike[str] | None,
) -> tuple[Request, Judge, Judge | None]:
    """What is asked of each step of a run; what judges one, and what looks closer at one that passes."""
    from ckptlint.lint.run import run as report_on
    from ckptlint.lint.settings.files import Settings, read_settings
    from ckptlint.lint.settings.request import Request
    from ckptlint.lint.steps.trust import looks_at
    from ckptlint.model.text import texts

    place = str(run)
    options = {"depth": depth, "select": texts(select), "ignore": texts(ignore), "fail-on": fail_on}
    settings = Settings() if config is None else read_settings(str(config), [place])
    request = Request.of(options, settings, [place], purpose)
    return request, *looks_at(request, report_on)


def load(path: str | PathLike[str]) -> Checkpoint:
    """The checkpoint under a path as data, for notebooks: the newest step of a run folder.

    >>> ckpt = load("fixtures/real/fsdp2_4r")
    >>> ckpt.format, len(ckpt.tensors), ckpt.tensors["model.norm.weight"].global_shape
    ('dcp', 84, (12,))

    Raises:
        NothingToCheckError: there is none.
        AccessError: the operating system refused a read.
    """
    from ckptlint.loaders.checkpoint import open_checkpoint
    from ckptlint.loaders.discover import find

    return open_checkpoint(find(str(path))[0])


def show(
    path: str | PathLike[str],
    pattern: str | None = None,
    *,
    tree: bool = False,
    ranks: bool = False,
    depth: Depth | str = "files",
) -> str:
    """What is in a checkpoint as text of 80 columns, without a verdict; `load` gives it as data.

    >>> print(show("fixtures/real/fsdp2_4r", "model.norm.weight").partition("\\n\\n")[2].split("\\n")[0])
    tensor             shape  chunks  size each

    Args:
        pattern: a glob of keys, or a key with slices (`'w[128:256, :]'`); None for all.
        tree: keys as a tree.
        ranks: which rank or file holds which layers.
        depth: `files`, `headers` or `data`: how deep to look for data that is lost.

    Raises:
        ConfigError: no tensor or region matches, or the arguments do not go together.
        CheckpointError: the checkpoint is unsafe or unreadable.
        NothingToCheckError: there is none.
        AccessError: the operating system refused a read.
    """
    from ckptlint.comparing.sides import open_side, read_records
    from ckptlint.depth import Depth
    from ckptlint.reporters.contents.checkpoint import contents_text
    from ckptlint.reporters.style import Style

    if depth not in [known for known in Depth if known.looks_at_files]:
        raise ConfigError(f"show reads no depth {depth!r}: files, headers, data")
    checkpoints = read_records(open_side(str(path), files=True, partial=True), Depth(depth))
    return contents_text(checkpoints, pattern, tree, ranks, Style())


def manifest(path: str | PathLike[str], *, values: bool = False, rows: bool = False) -> str:
    """The tensors of a checkpoint as JSON, for `check(other, expect=...)` once it is in a file.

    >>> manifest("fixtures/real/fsdp2_4r").split('"')[3]
    'ckptlint.manifest/1'

    Args:
        values: read the tensors, and add digests of what they hold.
        rows: with `values`, also a digest of each row: findings then name rows.

    Raises:
        ConfigError: rows without values.
        CheckpointError: the checkpoint is unsafe or unreadable, or its values could not be read.
        NothingToCheckError: there is none.
        AccessError: the operating system refused a read.
    """
    from ckptlint.comparing.manifest import manifest_of
    from ckptlint.comparing.sides import open_side

    if rows and not values:
        raise ConfigError("rows needs values")
    text, unread = manifest_of(open_side(str(path), files=values), values, rows)
    if unread:
        raise CheckpointError("\n".join(unread))
    return text


def explain(name: str) -> str:
    """The page of a rule or a cause: what it is, why it matters, how to fix it.

    >>> explain("GEO004").split("\\n")[0]
    'GEO004 coverage-hole'

    Raises:
        ConfigError: there is none of this name.
    """
    from ckptlint.lint.pages.rule_page import page_of
    from ckptlint.lint.registry import load_rules

    return page_of(load_rules(), name, 80)


def plan(
    path: str | PathLike[str],
    to: str | None = None,
    *,
    world: int | None = None,
    mesh: str | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    from_nodes: int | None = None,
    give_up: Collection[str] = (),
    megatron: str | None = None,
    timeout: float = 600,
    memory: str | None = None,
) -> Plan:
    """Whether the checkpoint under a path loads into a job of another shape, and what each of its ranks would read.

    >>> there = plan("fixtures/real/fsdp2_4r", "dp=3")
    >>> there.verdict, there.world, there.cost.requests[there.cost.kind].tolist()
    ('loads', 3, [149, 149, 149])

    Args:
        to: sizes of axes (`dp=64,tp=4,pp=2`), or a function of the job (`job.py:state_dict`), which is run for each
            rank in a process of its own and needs torch; None for as many ranks as saved, under FSDP.
        world: ranks of the job, for a function.
        mesh: the axes of the mesh that the function is given (`dp=4,tp=2`).
        nodes, ranks_per_node: how the ranks lie on nodes, for the files that each must see.
        from_nodes: so many nodes saved, and each has only the files that it wrote.
        give_up: `optim`, `rng`: what Megatron-LM does without (--no-load-optim, --no-load-rng).
        megatron: the version of megatron-core that loads (`0.16`); None for any from the one that saved on.
        timeout: seconds for the function.
        memory: what a rank has for the state that it loads (`80GiB`).

    Raises:
        CheckpointError: the checkpoint is unsafe, unreadable or incomplete.
        ConfigError: what was asked is nonsense, or the function gave no state dict.
        NothingToCheckError: there is no checkpoint.
        AccessError: the operating system refused a read.
        BudgetError: chunks and parts are too many to compare.
    """
    from ckptlint.loaders.checkpoint import open_checkpoint
    from ckptlint.loaders.discover import find
    from ckptlint.loaders.reference import obstacle
    from ckptlint.model.text import texts
    from ckptlint.planning.ask import PlanRequest, make_plan

    places = find(str(path))
    if len(places) > 1:
        raise ConfigError(f"{path} holds {len(places)} checkpoints: name one of them")
    ckpt = open_checkpoint(places[0])
    if why := obstacle(ckpt):
        raise CheckpointError(why)
    asked = PlanRequest(to, world, mesh, nodes, ranks_per_node, from_nodes, texts(give_up), megatron, timeout, memory)
    return make_plan(ckpt, asked)


def diff(
    old: str | PathLike[str],
    new: str | PathLike[str],
    layout: bool = False,
    values: bool = False,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    adapter: str | PathLike[str] | None = None,
) -> Diff | Values:
    """What differs between two checkpoints; with `values` whether they hold the same.

    >>> diff("fixtures/real/fsdp2_4r", "fixtures/real/fsdp2_4r", values=True).proven
    (84, 84)

    Args:
        layout: compare into what chunks tensors are cut, too.
        values: read both and compare what the tensors hold, whatever they are called.
        select, ignore: with `values`, globs of keys to compare and of those to leave out.
        adapter: with `values`, the folder of a LoRA adapter with which the new one should be the old one.

    Raises:
        ConfigError: the adapter is none.
        CheckpointError: a checkpoint cannot be read.
        NothingToCheckError: there is none.
        AccessError: the operating system refused a read.
    """
    from ckptlint.comparing.sides import by_place, open_side
    from ckptlint.model.text import texts

    sides = [open_side(str(path), files=values) for path in (old, new)]
    if values:
        from ckptlint.comparing.values.compare import compared_values

        merged = open_side(str(adapter), files=True) if adapter is not None else ()
        return compared_values(sides[0], sides[1], texts(select), texts(ignore), merged)
    from ckptlint.comparing.differences import differences

    return differences(by_place(sides[0]), by_place(sides[1]), layout)
