"""A folder in which links that lead nowhere, or downloads that did not end, are all that is left of a checkpoint."""

from __future__ import annotations

from ckptlint.loaders.layouts import CheckpointPlace, Evidence, Layout
from ckptlint.loaders.readers.dcp.payload_files import file_table
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import first_names, printable
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import WEIGHT_FILES, step_number
from ckptlint.vocabulary.litter import downloaded_name

_WEIGHTS = lazy_pattern(WEIGHT_FILES)


def _lost(folder: Folder) -> dict[str, str]:
    """Name of a file that is not there -> what is there of it; the steps of a run are checkpoints of their own."""
    if any(step_number(name) is not None for name in folder.folders()):
        return {}
    lost = {name: folder.lost_link(name) for name in folder.entries.strange if _WEIGHTS.fullmatch(name) or folder.part}
    for name in folder.files_beside():
        if _WEIGHTS.fullmatch(file := downloaded_name(name)):
            lost[file] = f"the download of {printable(file)} did not end: only {printable(name)} is there"
    return {name: sentence for name, sentence in lost.items() if sentence}


def _read(place: CheckpointPlace, _look_at_files: bool) -> Checkpoint:
    folder = place.folder
    lost = _lost(folder)
    name, sentence = next(iter(lost.items()))
    others = [printable(file) for file in lost if file != name]
    sentence += f"; the same is true of {first_names(others)}" if others else ""
    why = "nothing else of a checkpoint is in the folder, so nothing loads"
    hint = f"download {'them' if others else 'it'} again, or copy with links followed"
    problem = Problem("incomplete", printable(name), sentence, why=why, hint=hint, blocks=True)
    files, label = file_table(folder), printable(name)
    return Checkpoint(
        folder.display, "incomplete", files=files, problems=[problem], readable=False, metadata_file=label
    )


LAYOUTS = (
    Layout(
        kind="lost",
        order=95,
        formats={"incomplete": "incomplete"},
        recognise=lambda folder: next((Evidence(printable(name)) for name in _lost(folder)), None),
        read=_read,
        input_bytes=lambda _folder: 0,
        state=lambda _folder: "unfinished",
        looks_around=False,
    ),
)
