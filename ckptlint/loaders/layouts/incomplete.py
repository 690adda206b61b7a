"""A save of torch.distributed.checkpoint that never wrote its `.metadata`."""

from __future__ import annotations

from ckptlint.loaders.layouts import CheckpointPlace, Evidence, Layout
from ckptlint.loaders.layouts.dcp import has_payload
from ckptlint.loaders.layouts.unsupported import backend
from ckptlint.loaders.readers.common_state import COMMON_FILE, read_common
from ckptlint.loaders.readers.dcp.megatron import CONFIG_FILE, read_config
from ckptlint.loaders.readers.dcp.payload_files import file_table
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import first_names, plural, printable, verb
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.metadata_files import METADATA, UNFINISHED_METADATA, WRITTEN_LAST

_NO_METADATA = {"not-a-file": "is not a regular file"}


def _evidence(folder: Folder) -> Evidence | None:
    if payload := has_payload(folder):
        return Evidence(printable(payload))
    known = [name for name in (COMMON_FILE, UNFINISHED_METADATA) if folder.has(name)]
    if not known and backend(folder) == "torch_dist":
        known = [CONFIG_FILE]
    return Evidence(known[0]) if known else None


def _read(place: CheckpointPlace, _look_at_files: bool) -> Checkpoint:
    folder, recognised = place.folder, place.recognised
    assert recognised is not None
    files = file_table(folder)
    payload = len(files)
    evidence = plural(payload, "payload file") if payload else recognised.evidence.file
    count = payload or 1
    if folder.has(UNFINISHED_METADATA) and evidence != UNFINISHED_METADATA:
        evidence, count = f"{evidence} and {UNFINISHED_METADATA}", 2
    state = _NO_METADATA.get(folder.stat(METADATA)[0], "is missing")
    link = folder.lost_link(METADATA)
    there = f"{evidence} {verb(count, 'is')} there"
    if payload and not files.size.any():  # a rank without a tensor writes an empty file, but not all ranks do
        there = f"and {first_names(files.names)} {verb(payload, 'is')} empty (0 bytes)"
    if link:
        why = "the link was copied without the file that it leads to, so nothing says where each tensor lies"
        hint = "download it again, or copy with links followed"
        return unfinished(folder, f"{link}; {there}", METADATA, why, hint)
    return unfinished(folder, f"{METADATA} {state}, {there}", METADATA)


def unfinished(folder: Folder, sentence: str, file: str, why: str = "", hint: str = "") -> Checkpoint:
    """A step whose save never finished: the sentence says so, `file` is the one that it lacks, "" for all."""
    why = why or (WRITTEN_LAST if file else "a save began this step and never wrote it")
    problem = Problem("incomplete", file or folder.display, sentence, why=why, hint=hint, blocks=True)
    _, config_problem = read_config(folder)
    common, common_problems = read_common(folder, {})
    problems = [problem, *([config_problem] if config_problem else []), *common_problems]
    files = file_table(folder)
    return Checkpoint(folder.display, "incomplete", files=files, common=common, problems=problems, readable=False)


INCOMPLETE = Layout(
    kind="incomplete",
    order=40,
    formats={"incomplete": "incomplete"},
    recognise=_evidence,
    read=_read,
    input_bytes=lambda folder: folder.size(COMMON_FILE) if folder.has(COMMON_FILE) else 0,
    state=lambda _folder: "unfinished",
    marks=(COMMON_FILE,),
    looks_around=False,
    restore={
        "incomplete": "copy it from where it was written (a copy easily misses dot files); if it is not there "
        "either, the save was killed: use another step"
    },
)

LAYOUTS = (INCOMPLETE,)
