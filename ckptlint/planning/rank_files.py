"""What the loaders of per-rank torch files refuse in a job of another shape: they reshard nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.planning.outcome import Constraint

_LEGACY_AXES = ("tp", "pp", "vpp", "ep")


def refusals(ckpt: Checkpoint, to: Mapping[str, int], world: int) -> Iterator[Constraint]:
    """What stands against a load of verl's, DeepSpeed's or older Megatron's rank files.

    Args:
        to: sizes of axes that the job has; one that is not named is 1.
        world: ranks of the job.

    Source:
        verl 0.9.1 `FSDPCheckpointManager.load_checkpoint`; deepspeed 0.19.8 `DeepSpeedEngine._load_zero_checkpoint`;
        Megatron-LM 0.16.1 `megatron.training.checkpointing.get_checkpoint_name`
    """
    saved = {axis: size.size for axis, size in ckpt.topology.items()}
    if ckpt.format == "verl" and saved.get("world", world) != world:
        yield Constraint(
            "fails",
            f"verl puts the world size into the name of each rank's file: {saved['world']:,} ranks saved, the job has "
            f"{world:,}; merge the files first (python -m verl.model_merger)",
            source="verl 0.9.1, FSDPCheckpointManager.load_checkpoint",
        )
    if ckpt.format == "deepspeed":
        yield from _deepspeed(ckpt, saved, to)
    if ckpt.format == "megatron-legacy":
        others = {axis: saved[axis] for axis in _LEGACY_AXES if axis in saved and saved[axis] != to.get(axis, 1)}
        if others:
            sizes = ", ".join(f"{axis} {size} to {to.get(axis, 1)}" for axis, size in others.items())
            yield Constraint(
                "fails",
                f"each model-parallel rank reads the folder of its own numbers, and these change ({sizes}): convert "
                "the checkpoint with Megatron-LM's tools/checkpoint/convert.py",
                source="Megatron-LM 0.16.1, get_checkpoint_name",
            )


def _deepspeed(ckpt: Checkpoint, saved: Mapping[str, int], to: Mapping[str, int]) -> Iterator[Constraint]:
    asked = to.get("dp", 1) * to.get("dp_replicate", 1)
    has_zero = ckpt.rank_files is not None and any(file.kind == "optimizer" for file in ckpt.rank_files.files)
    if has_zero and saved.get("dp", asked) != asked:
        yield Constraint(
            "fails",
            f"DeepSpeed raises ZeRORuntimeException: {plural(saved['dp'], 'data-parallel rank')} saved, the job has "
            f"{asked:,}; convert it with ds_to_universal.py, or load it without the optimizer states",
            source="deepspeed 0.19.8, DeepSpeedEngine._load_zero_checkpoint",
        )
    changed = [axis for axis in ("tp", "pp") if saved.get(axis, 1) != to.get(axis, 1)]
    if changed:
        yield Constraint(
            "note",
            f"ckptlint does not know whether DeepSpeed loads it with a different {' and '.join(changed)}",
            guessed=True,
        )
