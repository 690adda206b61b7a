from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, Damage
from ckptlint.model.text import plural
from ckptlint.rule import MOST_KEYS, Finding, Location, Severity, require, rule

_SHOWN = 4


@rule("PAY012", "payload-checksum", Severity.ERROR, depth=Depth.DATA)
def payload_checksum(ckpt: Checkpoint) -> Iterator[Finding]:
    """The bytes of a payload file changed after they were written.

    What it checks:
        The CRC-32 of every member of every record, and of every other file of torch.save, matches its bytes. The
        SHA-256 of every file matches Megatron-Core's integrity.json, and every file it lists is there; a payload file
        that it or model.sig leaves out is info, and an error if `--expect-hashes` names the list. Lists of sha256sum
        (SHA256SUMS, sha256sums.txt, *.sha256) and model.sig hold for payload files, and absent ones with names like
        these but for a number. So do those that the Hub keeps (`hf://`), or that a download noted in
        `.cache/huggingface`. In huggingface_hub's cache the name of a large file's blob is its SHA-256.
        Records that zeros have overwritten are named too. A CRC of 0 means none.
    Why it matters:
        The bytes changed after they were written, and torch does not check them when it loads a tensor.
    Usual causes:
        A lost page, an incomplete copy, an overwritten file, a file from another save.
    How to fix:
        Copy the file again from where it was written, or go back one step.
    See:
        torch.serialization.set_crc32_options
    """
    payload = require(ckpt.payload)
    by_file: dict[tuple[str, str], list[Damage]] = defaultdict(list)
    for damage in payload.damages:
        kind = ("beside" if damage.member else "file") if damage.record < 0 else "member" if damage.member else "record"
        by_file[damage.file, kind].append(damage)
    for (file, kind), damages in by_file.items():
        if kind == "beside":
            yield _beside(file, damages)
        else:
            yield _whole(file, damages[0]) if kind == "file" else _records(ckpt, file, damages)
    if payload.unlisted:
        first, *others = payload.unlisted
        yield Finding(
            f"{payload.unlisted[first]} does not list {plural(1 + len(others), 'payload file')}, first {first}",
            at=Location(file=first),
            identity=(first, *others),
            files=tuple(others),
            severity=Severity.INFO,
            why="they were added after the checksums were taken, by another save or by hand",
        )


def _whole(file: str, damage: Damage) -> Finding:
    """The finding on a file that its list of checksums denies, or does not name."""
    recorded, source = damage.recorded[8:20], damage.recorded[76:]
    if damage.computed == "unlisted":
        message = f"{source} does not list {file}, so its content cannot be verified"
        hint = "add it to the list, or remove it: it is not a file of that release"
        return Finding(message, at=Location(file=file), identity=(file,), group="unlisted", hint=hint)
    lost = damage.computed == "absent"
    what = f"{source} lists {file}, which is missing" if lost else f"{file} is not the file that was written"
    return Finding(
        what if lost else f"{what}: its SHA-256 starts with {damage.computed[:12]}, but {source} says {recorded}",
        at=Location(file=file),
        identity=(file,),
        group="absent" if lost else "sha256",
        why="it was there when the checksums were taken, and a load that reads it fails" if lost else "",
        hint="copy it again from where it was written",
    )


def _beside(file: str, damages: list[Damage]) -> Finding:
    """The finding on a file of torch.save in which the checkpoint has no record."""
    first, more = damages[0], len(damages) - 1
    also = f" (and {plural(more, 'more member')} of it)" if more else ""
    message = (
        f"{first.member} in {file} does not match its checksum{also}: {first.recorded} recorded, {first.computed} "
        "computed"
    )
    hint = "compare the file with the one on the node that wrote it, and copy it again"
    return Finding(message, at=Location(file=file), identity=(file,), group="crc", hint=hint)


def _records(ckpt: Checkpoint, file: str, damages: list[Damage]) -> Finding:
    """The finding on the records of a file whose checksums differ; zeros in them show a lost write."""
    first = min(damages, key=lambda damage: int(ckpt.records.byte_offset[damage.record]))
    _, start, length = ckpt.byte_range_of(first.record)
    names = list(dict.fromkeys(ckpt.records.name(damage.record) for damage in damages))
    name = names[0] if len(names) == 1 else None
    count = len({damage.record for damage in damages})
    zeros = sum({damage.record: damage.zeros for damage in damages}.values())
    total = sum(ckpt.byte_range_of(record)[2] for record in {damage.record for damage in damages if damage.zeros})
    if first.member:
        many = f" in {count:,} records" if count > 1 else ""
        message = (
            f"{first.member} of {names[0]} in {file} does not match its checksum{many}: {first.recorded} recorded, "
            f"{first.computed} computed"
        )
    else:
        records = f"{plural(count, 'record')} in {file}"
        message = f"zeros have overwritten {records}, checksums included: {zeros:,} of {total:,} bytes"
    more = f"{len(damages) - _SHOWN:,} more members of this file" if len(damages) > _SHOWN else ""
    lost_page = f"{zeros:,} of {total:,} bytes of these records lie in blocks of 512 zeros, as a lost page leaves"
    return Finding(
        message,
        at=Location(name, file=file, byte_range=(start, length)),
        identity=(file, *names[:_SHOWN]),
        keys=tuple(names[:MOST_KEYS]),
        notes=(
            ("keys", ", ".join(_region(ckpt, damage) for damage in damages[:_SHOWN])),
            ("more", more),
            ("zeros", lost_page if first.member and zeros else ""),
        ),
        group="crc" if first.member else "zeros",
        hint="compare the file with the one on the node that wrote it, and copy it again",
    )


def _region(ckpt: Checkpoint, damage: Damage) -> str:
    name = ckpt.records.name(damage.record)
    tensor = ckpt.tensors.get(name)
    if tensor is None:
        return name
    rows = (tensor.chunks.record == damage.record).nonzero()[0]
    return f"{name} {tensor.tiling.box(int(rows[0]))}" if len(rows) else name
