"""One file by itself: a whole state, or one that belongs to no checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePath

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import Opaque
from ckptlint.formats.torch_file import read_torch_file
from ckptlint.loaders.layouts import CheckpointPlace, Evidence, Layout
from ckptlint.loaders.readers.plain import read_named
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import family_of


def _read(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    """A file by itself: a whole state, or one that belongs to no checkpoint; that is reported with the step files."""
    folder, name = place.folder, printable(place.folder.part)
    if (ckpt := read_named(folder, folder.part, look_at_files)) is not None:
        return ckpt
    family = family_of(folder.part)
    kind = f" (by its name: {family.name})" if family is not None else ""
    sentence = f"{name} is not a checkpoint that ckptlint checks{kind}"
    hint = _of_module(folder) or _INSTEAD.get(PurePath(folder.part).suffix.lower(), "")
    problem = Problem("unsupported", name, sentence, hint=hint, blocks=True)
    return Checkpoint(folder.display, "unsupported", problems=[problem], readable=False, metadata_file=name)


def _of_module(folder: Folder) -> str:
    """What to do where the file is a pickle of a module, alone or in a dict, in place of its weights; "" otherwise."""
    with suppress(UnreadableError, LimitError):
        root = read_torch_file(folder, folder.part).root
        for value in (root, *(root.values() if isinstance(root, dict) else ())):
            if isinstance(value, Opaque) and isinstance(value.state, dict) and "_parameters" in value.state:
                return f"it holds a whole {printable(value.name)} module: torch.save its state_dict(), and check that"
    return ""


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
