"""What a folder is, told from its names and the first bytes of `.metadata`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ckptlint.errors import CkptlintError, NothingToCheckError
from ckptlint.loaders.safetensors import groups
from ckptlint.model import printable
from ckptlint.storage.folder import Folder

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__([0-9]{1,9})\.metadata")
PAYLOAD_RANK = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp$")
STEP = re.compile(
    r"(?:iter_|iteration_|step[-_]?|global_step_?|checkpoint[-_]|epoch_\d+_step_|ep\d+-ba|(?:.*-)?step=)(\d+)"
    r"(?:-v\d+|-(?:consumed_samples|val_loss|train_loss)=[\d.]+)*(?:-last)?(?:\.ckpt)?|(\d{4,})"
)
COMPONENT = re.compile(
    r"consolidated|dist_ckpt|hf_weights|huggingface|model|model_and_optim|optim|sharded|trainer|weights|"
    r"optimizer(_\d+)?|pytorch_model_fsdp_\d+"
)
"""Folders that hold one part of a step: of torch, accelerate, Automodel, NeMo, OLMo-core, prime-rl, verl, xtuner."""

_HINTS = {
    "nanotron": "convert it with nanotron's examples/llama/convert_nanotron_to_hf.py",
    "Megatron-LM legacy torch": "convert it to torch_dist with Megatron-LM's tools/checkpoint/convert.py",
    "DeepSpeed ZeRO": "convert it with DeepSpeed's ds_to_universal.py or zero_to_fp32.py, which check it on the way",
    "DeepSpeed universal": "load it with DeepSpeed, which checks it on the way",
    "Orbax": "Orbax reads it; it is a JAX checkpoint",
    "zarr (Megatron-Core <= 0.15)": "load it with Megatron-Core <= 0.15 and save it as torch_dist",
    "ByteCheckpoint": "load it with ByteCheckpoint",
}

Kind = Literal["dcp", "per-rank", "safetensors", "incomplete", "unsupported"]


@dataclass(frozen=True, slots=True)
class Recognised:
    """What a folder holds.

    Attributes:
        kind: which loader takes it.
        name: the format's name, when it is not supported.
        evidence: the file that showed it.
    """

    kind: Kind
    name: str = ""
    evidence: str = ""


def unsupported_hint(name: str) -> str:
    """What to do with a format that is not checked."""
    return _HINTS.get(name, "give the folder of a DCP or torch_dist checkpoint, or convert it")


def recognise(folder: Folder) -> Recognised | None:
    """What the folder itself holds, its sub-folders aside; None when nothing here is known."""
    names = folder.files()
    payload = [name for name in names if name.endswith(".distcp")]
    if METADATA in names and (payload or _is_metadata(folder)):
        return Recognised("dcp")
    if any(RANK_METADATA.fullmatch(name) for name in names):
        return Recognised("per-rank")
    if payload or "common.pt" in names or ".metadata.tmp" in names or _backend(folder) == "torch_dist":
        known = payload[:1] + [name for name in ("common.pt", ".metadata.tmp", "metadata.json") if name in names]
        return Recognised("incomplete", evidence=known[0])
    if found := groups(folder):
        return Recognised("safetensors", evidence=(found[0].files or [found[0].index])[0])
    return unsupported(folder)


def unsupported(folder: Folder) -> Recognised | None:
    """A known format that ckptlint does not check, or None."""
    files = [name for name in folder.files() if not name.endswith(".distcp")]  # there may be 100,000 of these
    folders = folder.folders()
    marks: list[tuple[str, str | None]] = [
        ("Megatron-LM legacy torch", _first(folders, r"mp_rank_\d\d.*") or _first(files, r"model_optim_rng\.pt")),
        ("NVRx local checkpoint", _first(files, r"iter_\d{7}_\d+_local.*\.pt")),
        ("DeepSpeed universal", _first(files, r"latest_universal") or _universal(folder)),
        ("DeepSpeed ZeRO", _first(files, r".*zero_pp_rank_.*_optim_states\.pt|mp_rank_.*_model_states\.pt")),
        ("Orbax", _first(files + folders, r"_CHECKPOINT_METADATA|_METADATA|orbax\.checkpoint|manifest\.ocdbt|"
                         r"ocdbt\.process_.*|_sharding|array_metadatas|commit_success\.txt|_ROOT_METADATA")),
        ("zarr (Megatron-Core <= 0.15)", "metadata.json" if _backend(folder) == "zarr" else _zarr(folder)),
        ("torch_checkpointing", _first(files, r"metadata\.pkl")),
        ("per-rank torch.save files (verl)", _first(files, r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")),
        ("nanotron", _first(files, r"model_(weight|bias)(_pp-rank-.*)?\.safetensors")),
        ("TensorFlow", _first(files, r".+\.data-\d{5}-of-\d{5}")),
        ("Hugging Face torch shards", _first(files, r"pytorch_model-\d{5}-of-\d{5}\.bin")),
    ]  # fmt: skip
    for name, evidence in marks:
        if evidence:
            return Recognised("unsupported", name, printable(evidence))
    return None


def step_number(name: str) -> int | None:
    """The step that a folder name carries, or None.

    >>> step_number("iter_0000010"), step_number("step-500"), step_number("model")
    (10, 500, None)
    """
    match = STEP.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def find_checkpoints(folder: Folder, all_steps: bool) -> list[Folder]:
    """The checkpoint folders that a path means: itself, its newest step, or its components.

    Args:
        folder: what the user named.
        all_steps: every step of a run folder instead of the newest one.

    Raises:
        NothingToCheckError: there is none.
    """
    found = _find(folder, all_steps, levels=3)
    if not found and folder.unseen:
        hint = f"name the checkpoint folder itself, {folder.unseen}"
        raise NothingToCheckError(f"no .metadata under {folder.display}: {hint}")
    if not found:
        raise NothingToCheckError(
            f"no checkpoint under {folder.display}: looked for .metadata, __N.metadata, *.distcp, metadata.json, "
            "step folders (iter_*, step-*, step_*, global_step_*, checkpoint-*) and component folders"
        )
    return found


def components(folder: Folder) -> list[Folder]:
    """The checkpoints that lie in a folder itself, each as a view of it that hides the others; [] where none does.

    A folder holds several where safetensors of one model lie beside those of another, or beside a DCP checkpoint.
    """
    found = groups(folder)
    if not found:
        return [folder] if recognise(folder) else []
    weights = [name for group in found for name in (*group.files, group.index)]
    rest = folder.without(weights, "")
    other = recognise(rest)
    parts = [rest] if other is not None and other.kind != "unsupported" else []
    if not parts and len(found) == 1:
        return [folder]
    described = [name for name in folder.files() if parts and _is_dcp(name)]
    for group in found:
        hidden = {*weights, *described} - {*group.files, group.index}
        parts.append(folder.without(hidden, group.label))
    return parts


def _is_dcp(name: str) -> bool:
    known = (METADATA, f"{METADATA}.tmp", "common.pt", "metadata.json")
    return name in known or name.endswith(".distcp") or bool(RANK_METADATA.fullmatch(name))


def _find(folder: Folder, all_steps: bool, levels: int) -> list[Folder]:
    own = components(folder)
    has_weights = bool(groups(folder))
    if levels == 0 or (own and not has_weights):
        return own
    numbered = {name: number for name in folder.folders() if (number := step_number(name)) is not None}
    if own:  # a model is what its folder means; the steps of the run that made it lie beside it
        beside = [part for part in _nested(folder, numbered) if not _is_unsupported(part)]
        every = sorted(numbered, key=lambda name: numbered[name], reverse=True) if all_steps else []
        return own + beside + [part for name in every for part in _find(folder.sub(name), all_steps, levels - 1)]
    steps = sorted(numbered, key=lambda name: numbered[name], reverse=True)
    steps += [name for name in folder.folders() if name == "release"]
    found: list[Folder] = []
    unfinished: list[Folder] = []
    for name in steps:
        step = folder.sub(name)
        inside = _find(step, all_steps, levels - 1)
        (found if inside else unfinished).extend(inside or [step])
        if found and not all_steps:
            break
    if found or any(not step.entries for step in unfinished):
        # a newer step without a checkpoint in it is no reason to pass an older one
        return found + unfinished if all_steps else unfinished[:1] or found
    return _nested(folder)


def _nested(folder: Folder, but: Collection[str] = ()) -> list[Folder]:
    """The checkpoints in sub-folders, and one level further in folders that are named like a component."""
    found: list[Folder] = []
    for name in folder.folders():
        if name.startswith(".") or name in but:
            continue
        sub = folder.sub(name)
        inside = components(sub)
        found += inside
        if not inside or groups(sub):
            further = [name for name in sub.folders() if COMPONENT.fullmatch(name)]
            found += [part for name in further for part in components(sub.sub(name))]
    return found


def _is_unsupported(folder: Folder) -> bool:
    found = recognise(folder)
    return found is not None and found.kind == "unsupported"


def newest_readable_step(folder: Folder) -> str | None:
    """Name of the newest other step of the same run that has metadata, or None."""
    number, parent = step_number(folder.name), folder.parent
    if number is None or parent is None:
        return None
    try:
        steps = {name: n for name in parent.folders() if (n := step_number(name)) is not None and n != number}
        for name in sorted(steps, key=lambda name: steps[name], reverse=True):
            step = parent.sub(name)
            if step.has(METADATA) and step.head(METADATA, 1) == b"\x80":
                return name
    except CkptlintError:
        return None
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
    return False


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
    if "zero" in folder.folders() and folder.sub("zero").has("optimizer_state.pt"):
        return "zero/optimizer_state.pt"
    return None


def _zarr(folder: Folder) -> str | None:
    for name in folder.folders()[:8]:
        try:
            if folder.sub(name).has(".zarray"):
                return f"{name}/.zarray"
        except (CkptlintError, NothingToCheckError):
            continue
    return None
