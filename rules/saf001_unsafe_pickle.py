from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.model.text import unknown_classes
from ckptlint.rule import Finding, Severity, rule

_INERT = "ckptlint decoded them as inert values and did not look inside"


@rule("SAF001", "unsafe-pickle", Severity.ERROR, always=True, fixed=True)
def unsafe_pickle(ckpt: Checkpoint, trusted_modules: tuple[str, ...] = ()) -> Iterator[Finding]:
    """A pickle names something that checkpoint data does not need, or calls something unknown.

    What it checks:
        `.metadata` names only torch's and Megatron-Core's checkpoint classes. The common state may name classes of the
        training code, but calls only what ckptlint knows, with arguments of the shape that real files have, and never
        names dangerous functions (os, subprocess, importlib, eval, ...) or names with dots; an unknown class that is
        only made, and filled with data, is info. The same holds
        for pickles inside bytes, from depth files on for the files beside the tensors (optimizer, scheduler, random
        state, arguments, samplers, pickled weights), and from depth headers on for every record. ckptlint imports and
        calls none of these names. List packages of your own training code in `trusted-modules`: their classes and
        functions are not reported. A folder that brings code beside its weights (`auto_map`, `!!python/` tags,
        templates that reach for Python's own names) is info.
    Why it matters:
        torch reads `.metadata` with a plain pickle load, so opening the folder makes the calls that it names.
    Usual causes:
        Somebody planted code, or a custom writer stores its own classes.
    How to fix:
        Do not load the folder; find out who wrote the file.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemReader.read_metadata
    """
    for problem in ckpt.problems_of("unsafe", "note"):
        inside = tuple(f"{module}." for module in trusted_modules)
        strange = tuple(name for name in problem.unknown if not name.startswith(inside))
        if problem.unknown and not strange:
            continue
        message = problem.message.replace(unknown_classes(problem.unknown), unknown_classes(strange))
        finding = replace(Finding.of_problem(problem), message=message, identity=(message,))
        if problem.kind == "note":
            finding = replace(finding, severity=Severity.INFO, why=problem.why or _INERT)
        yield finding
