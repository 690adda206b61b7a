"""COM012: files that each rank or object has are all there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count, islice

from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.frameworks import number_of

_PAYLOAD = re.compile(r"__(\d{1,9})_\d+\.distcp")
_DATALOADER = re.compile(r"((?:.+\.)?dataloader\.dp_rank_)(\d{1,9})(?:\..*)?")
_NAMED = 8


@rule("COM012", "numbered-files", Severity.WARNING)
def numbered_files(ckpt: Checkpoint) -> Iterator[Finding]:
    """Files that trainers number by rank or object have gaps.

    What it checks:
        `rng_state_N.pth` of the Hugging Face Trainer and `random_states_N.pkl` of accelerate (one per rank), and
        `custom_checkpoint_N.pkl` (one per registered object) run from 0 without a gap, up to the last rank that wrote
        payload. So do the entries `dataloader.dp_rank_N` of torchtitan. It is only info if the files are those of whole
        later nodes of several ranks (4-7 of 8), since a node without a shared file system keeps its own files, or if
        rank 0 alone has a file.
    Why it matters:
        A resume continues with different random numbers on these ranks, or does not find the state of an object.
    Usual causes:
        A copy stopped midway, or a rank or node was killed during the save.
    How to fix:
        Copy the files again from where they were written.
    See:
        accelerate.checkpointing.save_accelerator_state
    """
    kept: dict[tuple[str, str, str, str], set[int]] = {}
    for file in ckpt.step_files:
        folder, slash, name = file.name.rpartition("/")
        if found := number_of(name):
            family, number = found
            pattern = re.sub(r"\d+(?=\.\w+$)", "{}", name)
            kept.setdefault((family.name, family.counted_by, folder + slash, pattern), set()).add(number)
    entries = _dataloaders(ckpt) if not ckpt.partial else {}
    if not kept and not entries:
        raise NotApplicable("no files or entries are numbered by rank or object")
    for prefix, numbers in entries.items():
        if lost := max(numbers) + 1 - len(numbers):
            names = _names(prefix + "{}", numbers, lost)
            yield Finding(
                f"the dataloader state of {plural(lost, 'rank')} of {max(numbers) + 1:,} is missing: "
                f"{', '.join(names)}",
                at=Location(names[0]),
                missing=tuple(names),
                alike=prefix,
                hint="save again with all ranks: the data of these ranks starts anew after a resume",
            )
    ranks = max((int(match[1]) for name in ckpt.files.names if (match := _PAYLOAD.search(name))), default=-1)
    for (what, counted_by, folder, pattern), numbers in kept.items():
        last = max(numbers | ({ranks} if counted_by == "rank" else set()))
        lost = last + 1 - len(numbers)
        if not lost:
            continue
        names = _names(folder + pattern, numbers, lost)
        # a job may save the state of rank 0 alone
        is_unsure = counted_by == "rank" and (numbers == {0} or (last == max(numbers) and _is_later_node(numbers)))
        noun = "rank" if counted_by == "rank" else "object"
        yield Finding(
            f"the {what} of {plural(lost, noun)} of {last + 1:,} is missing: {', '.join(names)}",
            at=Location(file=names[0]),
            missing=tuple(names),
            severity=Severity.INFO if is_unsure else None,
            alike=pattern,
            hint="" if is_unsure else "copy the files again from where they were written",
        )


def _dataloaders(ckpt: Checkpoint) -> dict[str, set[int]]:
    """The ranks whose dataloader has an entry, by what their keys have in common.

    Source:
        torchtitan.components.dataloader.ParallelAwareDataloader.state_dict
    """
    found: dict[str, set[int]] = {}
    for entry in ckpt.byte_objects:
        if match := _DATALOADER.fullmatch(entry.fqn):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found


def _is_later_node(numbers: set[int]) -> bool:
    """Whether ranks may be those of one node that shares no file system with the nodes before: as many, so often."""
    size, first = len(numbers), min(numbers)
    return size > 1 and max(numbers) - first + 1 == size and first % size == 0


def _names(pattern: str, numbers: set[int], lost: int) -> list[str]:
    """The first numbers from 0 on that are missing, in the pattern."""
    first = islice((number for number in count() if number not in numbers), min(lost, _NAMED))
    return [pattern.replace("{}", str(number)) for number in first] + ["..."] * (lost > _NAMED)
