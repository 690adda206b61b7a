"""One file by itself: a whole state, or one that belongs to no checkpoint."""

from __future__ import annotations

from pathlib import PurePath

from ckptlint.loaders.layouts import CheckpointPlace, Evidence, Layout
from ckptlint.loaders.readers.plain import read_named
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import printable
from ckptlint.vocabulary.frameworks import family_of


def _read(found: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    """A file by itself: a whole state, or one that belongs to no checkpoint; that is reported with the step files."""
    folder, name = found.folder, printable(found.folder.part)
    if (ckpt := read_named(folder, folder.part, look_at_files)) is not None:
        return ckpt
    family = family_of(folder.part)
    kind = f" (by its name: {family.name})" if family is not None else ""
    sentence = f"{name} is not a checkpoint that ckptlint checks{kind}"
    hint = _INSTEAD.get(PurePath(folder.part).suffix.lower(), "")
    problem = Problem("unsupported", name, sentence, hint=hint, blocks=True)
    return Checkpoint(folder.display, "unsupported", problems=[problem], readable=False, metadata_file=name)


_RESTORE = "name the folder of the checkpoint, the one that holds .metadata, *.safetensors or rank files"
_INSTEAD = {
    ".npz": "save its arrays as safetensors to have them checked",
    ".npy": "save it as safetensors to have it checked",
    ".onnx": "check the weights from which it was exported, and the file itself with onnx.checker",
}


LAYOUTS = (
    Layout(
        kind="file",
        order=100,
        formats={"torch": "torch.save", "unsupported": "not supported"},
        recognise=lambda folder: Evidence(printable(folder.part)) if folder.is_one_file else None,
        read=_read,
        input_bytes=lambda folder: sum(folder.entries[name].size for name in folder.files_beside()),
        looks_around=False,
        restore={"unsupported": _RESTORE},
    ),
)
