from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.trusted_config import flag, trusted
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.optimizer.records import content_metadata
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_few, plural, printable
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_BACKEND = "torch_dist"
_FSDP_RECORD = "optimizer.param_to_group_meta."


@rule("COM009", "layout-flags", Severity.ERROR)
def layout_flags(ckpt: Checkpoint) -> Iterator[Finding]:
    """The keys are not laid out as the flags of the save say.

    What it checks:
        Flags in Megatron-Core's `content_metadata` fit the keys: singleton_local_shards means keys `_w` and `_v`
        instead of one fused weight, non_homogeneous_layers numbered instead of stacked layers,
        chained_optim_avoid_prefix states without a prefix `chained_<i>.`. These are warnings; an absent flag is not
        judged. The backend in `metadata.json` is that of the files here. Flattened optimizer states, which newer
        versions refuse, are info.
    Why it matters:
        The loader looks for keys in the form that the flag implies, and finds none.
    Usual causes:
        The flag was not passed to every part of the state dict, or the writing and the loading version differ.
    How to fix:
        Load with the flag that fits the keys, or convert the checkpoint with the version that wrote it.
    See:
        megatron.training.checkpointing._build_sharded_state_dict_metadata
    """
    yield from _backend(ckpt)
    if not ckpt.is_torch_dist:
        raise NotApplicable("only Megatron-Core's torch_dist declares its layout")
    if flattened := [tensor for tensor in ckpt.sound_tensors() if tensor.is_flattened]:
        yield Finding(
            f"{len(flattened):,} optimizer states are stored flattened; Megatron-Core reads these up to version 0.15",
            at=Location(file=ckpt.metadata_file),
            identity=("flattened",),
            severity=Severity.INFO,
            why="later versions refuse flattened_range, so they cannot resume the optimizer",
            notes=(("keys", flattened[0].fqn),),
            hint="resume once with Megatron-Core 0.15 and save as fully_reshardable to carry the moments over",
        )
    flags = content_metadata(ckpt)
    inventory = inventory_of(ckpt)
    halves = [p.key.fqn for p in inventory.params if p.key.component in ("w", "v")]
    fused = [p.key.fqn for p in inventory.params if p.key.function == "mlp_in" and ".linear_fc1.weight" in p.key.fqn]
    stacked = [p.key.fqn for p in inventory.params if p.layer_axis is not None]
    alone = [state for state in inventory.states if not any(name.startswith("mimo.") for name in state.chain)]
    prefixed = [state.tensor.fqn for state in alone if any(name.startswith("chained_") for name in state.chain)]
    bare = [state.tensor.fqn for state in alone if not state.chain]
    if flags.get("singleton_local_shards") is False and halves:
        yield _finding(ckpt, "singleton_local_shards", False, halves, "halves _w and _v", "fused weights")
    if flags.get("singleton_local_shards") is True and fused and not halves and flag(trusted(ckpt), "gated"):
        yield _finding(ckpt, "singleton_local_shards", True, fused, "fused weights", "halves _w and _v")
    if flags.get("non_homogeneous_layers") is True and stacked:
        yield _finding(ckpt, "non_homogeneous_layers", True, stacked, "layers stacked on a dim", "numbered layers")
    if flags.get("chained_optim_avoid_prefix") is True and prefixed:
        yield _finding(ckpt, "chained_optim_avoid_prefix", True, prefixed, "states with a prefix chained_<i>.", "none")
    if flags.get("chained_optim_avoid_prefix") is False and bare and _chains(ckpt) > 1:
        wanted = f"a prefix for each of the {_chains(ckpt)} chains"
        yield _finding(ckpt, "chained_optim_avoid_prefix", False, bare, "states without a prefix", wanted)


def _finding(ckpt: Checkpoint, name: str, value: bool, keys: list[str], stored: str, wanted: str) -> Finding:
    source = ckpt.common.source if ckpt.common is not None else ""
    return Finding(
        f"{name} is {value}, but {plural(len(keys), 'key', 'is')} {stored}",
        at=Location(file=source, label=f"{source}: content_metadata"),
        identity=(name, str(value)),
        severity=Severity.WARNING,
        notes=(("expected", wanted), ("keys", first_few(keys))),
        hint=f"load with {name}={not value}, or find out how the writer set this flag",
    )


def _backend(ckpt: Checkpoint) -> Iterator[Finding]:
    """A finding if Megatron-Core chooses another reader than the files here need.

    Source: megatron.core.dist_checkpointing.core.CheckpointingConfig: `torch_dist` or, up to 0.15, `zarr`
    """
    declared = ckpt.declared.get("sharded_backend")
    if declared is None:
        return
    is_fsdp = any(entry.fqn.startswith(_FSDP_RECORD) for entry in ckpt.byte_objects)
    if declared.value == _BACKEND and not is_fsdp:
        return
    backend = "fsdp_dtensor, which has no such file" if is_fsdp else _BACKEND
    yield Finding(
        f"{declared.source} says sharded_backend {printable(str(declared.value))}, but the files here are {backend}",
        at=Location(file=declared.source),
        identity=("sharded_backend",),
        why="Megatron-Core chooses its reader by this, and that reader does not find its files",
        hint=f"delete {declared.source}"
        if is_fsdp
        else f"restore {declared.source} from another step of the job, or set {_BACKEND} there",
    )


def _chains(ckpt: Checkpoint) -> int:
    optimizer = ckpt.common_value("optimizer")
    return sum(str(key).isdecimal() for key in optimizer) if isinstance(optimizer, dict) else 0
