from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice

from ckptlint.analysis.ranks.numbered_files import PAYLOAD, NumberedFiles, exact_ranks, is_one_of_several, stated_ranks
from ckptlint.analysis.ranks.numbered_files import numbered_files as sets_of
from ckptlint.model import Checkpoint
from ckptlint.model.lost_files import by_node
from ckptlint.model.text import join_words, plural, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.parts import part_of_file, part_of_key

_DATALOADER = lazy_pattern(r"((?:.+\.)?dataloader\.dp_rank_)(\d{1,9})(?:\..*)?")
_OF_ALL_RANKS = lazy_pattern(r"(?:.*/)?dl_state_dict(?:_\d+)?\.bin")
_NAMED = 8
_LISTED = 2**16
_MANY = 3  # stored files for each missing one, at least, where nothing says what the numbers count


@rule("COM012", "numbered-files", Severity.ERROR)
def numbered_files(ckpt: Checkpoint) -> Iterator[Finding]:
    """A set of files that ranks or objects number is not whole.

    What it checks:
        Files of state whose names differ in one number are a set: `rng_state_N.pth`, `dataloader/rank_N.pt`,
        `data_N.pt`. So are files of one name in the folders of ranks (`rank_N/distrib_optim.pt`). Where it counts ranks
        it runs from 0 without a gap, up to the last rank that payload files, the mesh or other sets state: an error if
        two of these agree on the number of ranks, a warning if one says it. Sets of objects (`custom_checkpoint_N.pkl`)
        and the entries `dataloader.dp_rank_N` of torchtitan have no gap: a warning. Where nobody says what a number
        counts, a gap in a set from 0 on is info, or a warning if the set would have one file of each rank. An even
        distance (0, 8, 16: one rank of each node or group writes) is no gap, but what breaks it is. It is only info if
        such a set does not reach the first or the last group, if two files are all and nobody states the ranks, if the
        files are those of whole later nodes (4-7 of 8), if rank 0 alone has one, or if a set of dataloaders is whole
        for a number of data-parallel ranks (0-3 of 8). All files of a set state one step, but for objects that count by
        themselves (`optimizer_1.bin`). None is of a rank beyond those that the job states exactly (VeOmni's manifest):
        a warning, or an error if two agree. Data-parallel ranks (`train_dataloader_dprank000.pt`) are as many as the
        arguments state. One `dl_state_dict.bin` beside random states of several ranks is info.
    Why it matters:
        A resume continues with other random numbers or data on these ranks, or lacks the state of an object.
    Usual causes:
        A copy stopped midway, or a rank was killed during the save; ranks wrote one file over each other; a smaller job
        saved into the folder of a larger one.
    How to fix:
        Copy the files again from where they were written.
    See:
        accelerate.checkpointing.save_accelerator_state, NVIDIA/Megatron-LM#7413
    """
    file_sets = sets_of(ckpt)
    yield from _of_all_ranks(ckpt, file_sets)
    entries = _dataloader_ranks(ckpt) if not ckpt.partial_because else {}
    if not file_sets and not entries:
        raise NotApplicable("no files or entries are numbered by rank or object")
    for prefix, numbers in entries.items():
        if lost := max(numbers) + 1 - len(numbers):
            names = _first_names(_missing_names(prefix + "{}", numbers, lost), lost)
            yield Finding(
                f"the dataloader state of {plural(lost, 'rank')} of {max(numbers) + 1:,} is missing: "
                f"{', '.join(names)}",
                at=Location(names[0]),
                identity=tuple(names),
                severity=Severity.WARNING,
                group=prefix,
                hint="save again with all ranks: after a resume these ranks start their data from the beginning",
            )
    for numbered in file_sets:
        stated = stated_ranks(ckpt, numbered)
        size = max(exact_ranks(ckpt, numbered.axis).values(), default=0)
        files = numbered.files
        from_1 = numbered.counts == "rank" and (min(files), max(files), len(files)) == (1, size, size)
        if not from_1:
            yield from _missing_files(numbered, stated)
            yield from _files_beyond(numbered, stated, size)
        if not any(is_one_of_several(ckpt, file.name) for file in numbered.files.values()):
            yield from _other_steps(numbered)


def _of_all_ranks(ckpt: Checkpoint, file_sets: Iterable[NumberedFiles]) -> Iterator[Finding]:
    """That several ranks wrote where their data stood into one file.

    Source: accelerate.checkpointing.save_accelerator_state (1.15): the name has no rank; huggingface/accelerate#4165
    """
    ranks = max((len(files.files) for files in file_sets if files.pattern.endswith("random_states_{}.pkl")), default=0)
    names = [file.name for file in ckpt.step_files if _OF_ALL_RANKS.fullmatch(file.name)]
    if ranks > 1 and names:
        message = f"{names[0]} says where the data of one rank stood, and {ranks} ranks wrote this file"
        why = "the last rank that wrote it stays, and after a resume all ranks read on from there"
        hint = "nothing is lost if rank 0 reads the data for all (dispatch_batches)"
        yield Finding(message, at=Location(file=names[0]), severity=Severity.INFO, kind="one file", why=why, hint=hint)


def _missing_files(numbered: NumberedFiles, stated: dict[str, int]) -> Iterator[Finding]:
    """A finding on the numbers of a set without a file, up to the highest number of ranks that anything states."""
    numbers, last = numbered.files.keys(), max(numbered.files)
    is_of_ranks = numbered.counts == "rank"
    counts_all = is_of_ranks and numbered.axis == "world"
    total = max([last + 1, *(stated.values() if is_of_ranks else ())])
    # How many ranks there were is inferred from the highest number, payload, mesh and other sets; an error needs two.
    agreeing = [who for who, ranks in stated.items() if ranks == total]
    confidence: Confidence = "certain" if counts_all and len(agreeing) + (total == last + 1) > 1 else "likely"
    first, stride = numbered.stride(total)
    if inside := stride > 1 and len(range(min(numbers), last + 1, stride)) > len(numbers):
        first, total = min(numbers), last + 1  # a set with a stride may begin and end anywhere
    lost = len(range(first, total, stride)) - len(numbers)
    if not lost:
        return
    if not numbered.counts:
        if 0 not in numbers or stride > 1 or len(numbers) < _MANY * lost:
            return
        confidence = "likely" if agreeing else "possible"
    elif counts_all and not inside:
        may_be_all = _may_be_all_written(set(numbers), total, agreeing) or _may_be_data_parallel(numbered, total)
        confidence = "possible" if stride > 1 or may_be_all else confidence
    missing = _missing_names(numbered.pattern, set(numbers), lost, first, stride, numbered)
    names = _first_names(missing, lost)
    what = f"the {numbered.what} of {plural(lost, 'rank')}" if is_of_ranks else plural(lost, numbered.what)
    because = f"{total:,} ranks according to {join_words(agreeing)}" if agreeing and is_of_ranks else ""
    yield Finding(
        f"{what} of {len(numbers) + lost:,} {verb(1 if is_of_ranks else lost, 'is')} missing: {', '.join(names)}",
        at=Location(file=names[0]),
        identity=tuple(names),
        confidence=confidence,
        group=numbered.pattern,
        lost_files=by_node(missing if counts_all else dict.fromkeys(missing), numbers if counts_all else ()),
        notes=(("because", because),),
        hint="" if confidence == "possible" else "copy the files again from where they were written",
    )


def _files_beyond(numbered: NumberedFiles, stated: dict[str, int], size: int) -> Iterator[Finding]:
    """A finding on files of ranks at or above `size`, the exact number of ranks; 0 if nothing states it."""
    names = [file.name for number, file in sorted(numbered.files.items()) if number >= size]
    if not size or numbered.counts != "rank" or not names:
        return
    agreeing = [who for who, ranks in stated.items() if ranks == size and who != PAYLOAD]
    noun = "rank" if numbered.axis == "world" else "data-parallel rank"
    yield Finding(
        f"the {numbered.what} of {plural(len(names), 'rank')} lies beyond the {plural(size, noun)} of this job: "
        f"{', '.join(_first_names(names, len(names)))}",
        at=Location(file=names[0]),
        confidence="likely" if len(agreeing) < 2 else "certain",
        kind="beyond",
        notes=(("because", f"{plural(size, 'rank')} according to {join_words(agreeing)}"),),
        hint="these are left from a larger job: save into an empty folder, or remove them",
    )


def _other_steps(numbered: NumberedFiles) -> Iterator[Finding]:
    steps = Counter(file.step for file in numbered.files.values() if file.step is not None)
    if len(steps) < 2:
        return
    usual, most = steps.most_common(1)[0]
    odd = [file for _, file in sorted(numbered.files.items()) if file.step not in (None, usual)]
    yield Finding(
        f"{odd[0].name} says step {odd[0].step}, but {plural(most, 'other file')} of its set "
        f"{verb(most, 'says')} step {usual}",
        at=Location(file=odd[0].name),
        identity=tuple(file.name for file in odd),
        severity=Severity.WARNING,
        kind="step",
        hint="take all files of the set from the same save",
    )


def _may_be_all_written(numbers: set[int], total: int, agree: list[str]) -> bool:
    """Whether a job may write only these: rank 0, one rank of each of two groups, or the ranks of a later node."""
    # Nodes without a shared file system each keep the files of their own ranks, as many as any other node, so the first
    # number of a later node is a multiple of its size.
    first, last, size = min(numbers), max(numbers), len(numbers)
    if size == 2 and first < last - first > 1:
        return agree == [PAYLOAD] * (total > last + 1)
    return numbers == {0} or (size > 1 and total == last + 1 == first + size and first % size == 0)


def _may_be_data_parallel(numbered: NumberedFiles, total: int) -> bool:
    """Whether these may be all data-parallel ranks. Source: torchtitan.components.dataloader.ParallelAwareDataloader"""
    is_data = "dataloader" in (part_of_file(numbered.what), part_of_key(numbered.pattern))
    count = len(numbered.files)
    return is_data and count > 1 and max(numbered.files) == count - 1 and total % count == 0


def _dataloader_ranks(ckpt: Checkpoint) -> dict[str, set[int]]:
    """Prefix of keys -> ranks. Source: torchtitan.components.dataloader.ParallelAwareDataloader.state_dict"""
    ranks_of: dict[str, set[int]] = {}
    for entry in ckpt.byte_objects:
        if match := _DATALOADER.fullmatch(entry.fqn):
            ranks_of.setdefault(match[1], set()).add(int(match[2]))
    return ranks_of


def _missing_names(
    pattern: str, numbers: set[int], lost: int, first: int = 0, stride: int = 1, numbered: NumberedFiles | None = None
) -> dict[str, int]:
    """Name -> number of the missing files, with as many digits as the stored names have; 65,536 at most."""
    shortest = min((len(file.name) for file in numbered.files.values()), default=0) if numbered is not None else 0
    digits = max(shortest - len(pattern) + 2, 1)
    missing = islice((number for number in count(first, stride) if number not in numbers), min(lost, _LISTED))
    return {pattern.replace("{}", f"{number:0{digits}}"): number for number in missing}


def _first_names(missing: Iterable[str], lost: int) -> list[str]:
    """The first eight names, and "..." if there are more."""
    return [*islice(missing, _NAMED)] + ["..."] * (lost > _NAMED)
