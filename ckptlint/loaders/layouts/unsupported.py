"""Formats that ckptlint knows by name and does not check."""

from __future__ import annotations

import json
import re

from ckptlint.errors import CkptlintError, NothingToCheckError
from ckptlint.loaders.layouts import Evidence, Found, Layout, recognise
from ckptlint.loaders.rank_files.megatron_keys import legacy_file
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.litter import is_litter

_HINTS = {
    "nanotron": "convert it with nanotron's examples/llama/convert_nanotron_to_hf.py",
    "Megatron-LM legacy torch": "move it to a folder of its own, where ckptlint checks it",
    "Orbax": "read it with Orbax: it is a JAX checkpoint",
    "NeMo 1 or other, in mp_rank folders": "convert it to torch_dist with NeMo",
    "NVRx local checkpoint": "load it with the job that wrote it and save it globally, as torch_dist: each node holds "
    "only the part of its ranks",
    "torchsnapshot": "load it with torchsnapshot and save it with torch.distributed.checkpoint",
    "PaddlePaddle": "load it with paddle.distributed.load_state_dict, which reads its N.metadata",
    "GGUF": "check the safetensors from which it was made",
    "NeMo, packed": "unpack it (it is a tar archive) and name the folder of weights in it",
    "zarr (Megatron-Core <= 0.15)": "load it with Megatron-Core <= 0.15 and save it as torch_dist",
    "ByteCheckpoint": "load it with ByteCheckpoint",
}

_PADDLE = r"\d{1,9}\.metadata"
_ALONE = (("GGUF", r".+\.gguf"), ("NeMo, packed", r".+\.nemo"))
"""Files that are a model by themselves, where nothing else lies in the folder that is known."""


def _hint(name: str) -> str:
    """What to do with a format that is not checked."""
    return _HINTS.get(name, "name the folder of a DCP or torch_dist checkpoint, or convert this one")


def unsupported(folder: Folder) -> Evidence | None:
    """A known format that ckptlint does not check, or None."""
    files = [name for name in folder.files_beside() if not (name.endswith(".distcp") or is_litter(name))]
    folders = folder.folders()
    marks: list[tuple[str, str | None]] = [
        ("NeMo 1 or other, in mp_rank folders", None if legacy_file(folder) else _first(folders, r"mp_rank_\d\d.*")),
        ("NVRx local checkpoint", _first(files, r"iter_\d{7}_\d+_local.*\.pt")),
        ("Orbax", _first(files + folders, r"_CHECKPOINT_METADATA|_METADATA|orbax\.checkpoint|manifest\.ocdbt|"
                         r"ocdbt\.process_.*|_sharding|array_metadatas|commit_success\.txt|_ROOT_METADATA")),
        ("zarr (Megatron-Core <= 0.15)", "metadata.json" if backend(folder) == "zarr" else _zarr(folder)),
        ("torch_checkpointing", _first(files, r"metadata\.pkl")),
        ("nanotron", _first(files, r"model_(weight|bias)(_pp-rank-.*)?\.safetensors")),
        ("PaddlePaddle", _first(files, _PADDLE)),
        ("torchsnapshot", _first(files, r"\.snapshot_metadata")),
        ("TensorFlow", _first(files, r".+\.data-\d{5}-of-\d{5}")),
    ]  # fmt: skip
    for name, evidence in marks:
        if evidence:
            return Evidence(printable(evidence), name)
    return None


def unread_beside(folder: Folder) -> list[Problem]:
    """The format that lies in a checkpoint's folder too, and is not read."""
    other = unsupported(folder)
    if (file := legacy_file(folder)) and (found := recognise(folder)) and found.kind != "megatron-legacy":
        other = Evidence(printable(file.partition("/")[0]), "Megatron-LM legacy torch")
    return [] if other is None else [unsupported_problem(other, beside=True)]


def unsupported_problem(found: Evidence, beside: bool = False) -> Problem:
    """That a format is not checked, with what to do; `beside` where it lies beside a checkpoint that is."""
    sentence = f"{found.file} belongs to a format that ckptlint does not check: {found.name}"
    return Problem("unsupported", found.file, sentence, hint=_hint(found.name), blocks=not beside, beside=beside)


def backend(folder: Folder) -> str | None:
    """The backend that Megatron-Core's `metadata.json` names."""
    if not folder.has("metadata.json"):
        return None
    try:
        config = json.loads(folder.head("metadata.json", 65536))
    except (ValueError, RecursionError):
        return None
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    return backend if isinstance(backend, str) else None


def _first(names: list[str], pattern: str) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name)), None)


def _zarr(folder: Folder) -> str | None:
    for name in folder.folders()[:8]:
        try:
            if not folder.outside(name) and folder.sub(name).has(".zarray"):
                return f"{name}/.zarray"
        except (CkptlintError, NothingToCheckError):
            continue
    return None


def _paddle(folder: Folder) -> Evidence | None:
    """Its payload files are called as DCP's are, so it is asked for before a DCP save that lost its metadata."""
    found = _first([name for name in folder.files_beside() if not is_litter(name)], _PADDLE)
    return None if found is None else Evidence(found, "PaddlePaddle")


def _any(folder: Folder) -> Evidence | None:
    if (found := unsupported(folder)) is not None:
        return found
    names = [name for name in folder.files_beside() if not is_litter(name)]
    is_file = folder.part != "" and [*folder.entries] == [folder.part]
    for name, pattern in _ALONE:
        if (is_file or not folder.folders()) and (packed := _first(names, pattern)):
            return Evidence(printable(packed), name)
    return None


def _read(found: Found, _look_at_files: bool) -> Checkpoint:
    assert found.recognised is not None
    problem = unsupported_problem(found.recognised.evidence)
    return Checkpoint(found.folder.display, "unsupported", problems=[problem], readable=False)


LAYOUTS = tuple(
    Layout(
        kind="unsupported",
        order=order,
        formats={"unsupported": "not supported"},
        recognise=recognised,
        read=_read,
        input_bytes=lambda _folder: 0,
    )
    for order, recognised in ((30, _paddle), (90, _any))
)
