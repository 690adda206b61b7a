"""What a folder is, told from its names and the first bytes of `.metadata`."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ckptlint.errors import CkptlintError, LimitError, NothingToCheckError
from ckptlint.formats.safe_pickle import asks_for_names
from ckptlint.loaders.rank_files.megatron_keys import legacy_file
from ckptlint.loaders.rank_files.sets import SetKind, file_sets
from ckptlint.loaders.safetensors import groups
from ckptlint.model.facts import fact
from ckptlint.model.text import printable
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.litter import is_litter

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__([0-9]{1,9})\.metadata")
PAYLOAD_RANK = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp$")

_TEXT_LIMIT = 1024**2

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

LayoutKind = Literal["dcp", "per-rank", "safetensors", "incomplete", "unsupported", "file"] | SetKind


@dataclass(frozen=True, slots=True)
class Recognised:
    """What a folder holds.

    Attributes:
        kind: which loader takes it.
        name: the format's name, when it is not supported.
        evidence: the file that showed it.
    """

    kind: LayoutKind
    name: str = ""
    evidence: str = ""


def unsupported_hint(name: str) -> str:
    """What to do with a format that is not checked."""
    return _HINTS.get(name, "name the folder of a DCP or torch_dist checkpoint, or convert this one")


@fact
def recognise(folder: Folder) -> Recognised | None:
    """What the folder itself holds, its sub-folders aside; None when nothing here is known."""
    names = [name for name in folder.files_beside() if not is_litter(name)]
    plain = folder.entries.payload[:1].tolist()
    payload = [name.decode() for name in plain] or [name for name in names if name.endswith(".distcp")]
    if METADATA in names and (payload or _is_metadata(folder)):
        return Recognised("dcp")
    if any(RANK_METADATA.fullmatch(name) for name in names):
        return Recognised("per-rank")
    if paddle := _first(names, _PADDLE):
        return Recognised("unsupported", "PaddlePaddle", paddle)
    if payload or "common.pt" in names or ".metadata.tmp" in names or _backend(folder) == "torch_dist":
        known = payload[:1] + [name for name in ("common.pt", ".metadata.tmp", "metadata.json") if name in names]
        return Recognised("incomplete", evidence=known[0])
    if found := groups(folder):
        return Recognised("safetensors", evidence=(found[0].files or [found[0].index])[0])
    if evidence := _universal(folder):
        return Recognised("deepspeed-universal", evidence=evidence)
    if evidence := legacy_file(folder):
        return Recognised("megatron-legacy", evidence=evidence)
    if sets := file_sets(folder):
        return Recognised(sets[0].kind, evidence=(sets[0].files or [sets[0].index])[0])
    if other := unsupported(folder):
        return other
    is_file = folder.part != "" and [*folder.entries] == [folder.part]
    for name, pattern in _ALONE:
        if (is_file or not folder.folders()) and (packed := _first(names, pattern)):
            return Recognised("unsupported", name, printable(packed))
    return Recognised("file", evidence=printable(folder.part)) if is_file else None


def unsupported(folder: Folder) -> Recognised | None:
    """A known format that ckptlint does not check, or None."""
    files = [name for name in folder.files_beside() if not (name.endswith(".distcp") or is_litter(name))]
    folders = folder.folders()
    marks: list[tuple[str, str | None]] = [
        ("NeMo 1 or other, in mp_rank folders", None if legacy_file(folder) else _first(folders, r"mp_rank_\d\d.*")),
        ("NVRx local checkpoint", _first(files, r"iter_\d{7}_\d+_local.*\.pt")),
        ("Orbax", _first(files + folders, r"_CHECKPOINT_METADATA|_METADATA|orbax\.checkpoint|manifest\.ocdbt|"
                         r"ocdbt\.process_.*|_sharding|array_metadatas|commit_success\.txt|_ROOT_METADATA")),
        ("zarr (Megatron-Core <= 0.15)", "metadata.json" if _backend(folder) == "zarr" else _zarr(folder)),
        ("torch_checkpointing", _first(files, r"metadata\.pkl")),
        ("nanotron", _first(files, r"model_(weight|bias)(_pp-rank-.*)?\.safetensors")),
        ("PaddlePaddle", _first(files, _PADDLE)),
        ("torchsnapshot", _first(files, r"\.snapshot_metadata")),
        ("TensorFlow", _first(files, r".+\.data-\d{5}-of-\d{5}")),
    ]  # fmt: skip
    for name, evidence in marks:
        if evidence:
            return Recognised("unsupported", name, printable(evidence))
    return None


def _is_metadata(folder: Folder) -> bool:
    """Whether a `.metadata` without payload files is DCP's: Flutter projects keep a text file of that name."""
    start = folder.head(METADATA, 4096)
    if not start or start[:1] == b"\x80" or start.startswith(b"version https://git-lfs") or folder.has("metadata.json"):
        return True
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start < len(start) - 4
    return _is_old_pickle(folder)


def _is_old_pickle(folder: Folder) -> bool:
    """Whether a text is a pickle of protocol 0 that would call something; what cannot be told in a child process is."""
    try:
        data = folder.read(METADATA, _TEXT_LIMIT)
        if data.count(b"\n") < 2 and pickle.STACK_GLOBAL not in data:  # GLOBAL and INST end two lines
            return False
        return isolated(partial(asks_for_names, data), len(data))
    except LimitError:
        return True


def _backend(folder: Folder) -> str | None:
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


def _universal(folder: Folder) -> str | None:
    """The file that shows DeepSpeed's universal form: a folder `zero` with one folder for each parameter."""
    if "zero" not in folder.folders() or folder.outside("zero"):
        return None
    zero = folder.sub("zero")
    if zero.has("optimizer_state.pt"):
        return "zero/optimizer_state.pt"
    inner = [name for name in zero.folders()[:4] if not zero.outside(name)]
    return next((f"zero/{name}/fp32.pt" for name in inner if zero.sub(name).has("fp32.pt")), None)


def _zarr(folder: Folder) -> str | None:
    for name in folder.folders()[:8]:
        try:
            if not folder.outside(name) and folder.sub(name).has(".zarray"):
                return f"{name}/.zarray"
        except (CkptlintError, NothingToCheckError):
            continue
    return None
