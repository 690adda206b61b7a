"""SAF001: no pickle asks for anything but checkpoint data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.model.text import unknown_classes
from ckptlint.rule import Finding, Severity, rule

_INERT = "they were decoded as inert values and not looked at"


@rule("SAF001", "unsafe-pickle", Severity.ERROR, always=True, fixed=True)
def unsafe_pickle(ckpt: Checkpoint, trusted_modules: tuple[str, ...] = ()) -> Iterator[Finding]:
    """A pickle names something that checkpoint data does not need, or calls what nobody knows.

    What it checks:
        Every name in `.metadata` is one of torch's or Megatron-Core's checkpoint classes. In the common state, where
        classes of the training code are normal, the call decides: what the stream calls is one of the exact names whose
        effect is known, and names known to be dangerous (os, subprocess, importlib, eval, ...) or with dots in them are
        refused, called or not. A class nobody knows that is only made and filled is a note. Pickles inside bytes are
        read too. From depth files on the same holds for the files that a trainer saves beside the tensors (optimizer,
        scheduler, random state, arguments, samplers, pickled weights), whatever form of torch.save or pickle they have;
        from depth headers on for every record of the payload. ckptlint resolves and calls none of them.
        `trusted-modules` lists packages of your own training code: neither their classes nor their functions are
        reported.
    Why it matters:
        torch reads `.metadata` with a plain pickle load, so opening the folder runs what it names.
    Usual causes:
        A planted payload, or a custom writer that stores its own classes.
    How to fix:
        Do not load the folder; ask whoever gave it to you.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemReader.read_metadata
    """
    for problem in ckpt.problems_of("unsafe", "note"):
        strange = tuple(name for name in problem.unknown if not _is_of(name, trusted_modules))
        if problem.unknown and not strange:
            continue
        message = problem.message.replace(unknown_classes(problem.unknown), unknown_classes(strange))
        finding = replace(Finding.of_problem(problem), message=message, missing=(message,))
        if problem.kind == "note":
            finding = replace(finding, severity=Severity.INFO, why=problem.why or _INERT)
        yield finding


def _is_of(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a dotted name lies in one of these packages or modules."""
    return any(name.startswith(f"{module}.") for module in modules)
