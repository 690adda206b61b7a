from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import PurePath

from ckptlint.analysis.fit.trusted_config import flag, trusted
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_few
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import parse


@rule("COM007", "optimizer-presence", Severity.WARNING)
def optimizer_presence(ckpt: Checkpoint) -> Iterator[Finding]:
    """The job says that it saves the optimizer and none is stored, or the reverse.

    What it checks:
        `save_optim` or `no_save_optim` of the job's configuration agrees with whether any key belongs to an optimizer.
        Not judged in a folder `release`, at iteration 0 and after a finetuning start, where weights are exported alone,
        nor where no flag is declared.
    Why it matters:
        A resume stops with a KeyError, or starts with fresh moments although the configuration promises saved ones.
    Usual causes:
        The flag changed between two jobs, or an export of the weights kept the configuration of the training.
    How to fix:
        Load only the weights (finetune, or no_load_optim), or resume from a step that has the optimizer.
    See:
        megatron.training.checkpointing.generate_state_dict
    """
    if ckpt.format not in ("torch_dist", "fsdp_dtensor", "torch_dcp", "megatron-legacy"):
        raise NotApplicable("only Megatron's formats declare whether the optimizer was saved")
    declared = trusted(ckpt)
    saved, not_saved = flag(declared, "save_optim"), flag(declared, "no_save_optim")
    if saved is None and not_saved is None:
        raise NotApplicable("no flag says whether the optimizer was saved")
    name = "save_optim" if saved is not None else "no_save_optim"
    promised = saved if saved is not None else not not_saved
    names = chain(ckpt.tensors, ckpt.objects.keys, (entry.fqn for entry in ckpt.byte_objects))
    keys = [fqn for fqn in names if parse(fqn).kind == "optimizer"]
    # such a folder holds only weights by design
    is_first = PurePath(ckpt.path).name == "release" or ckpt.common_value("iteration") == 0
    if bool(keys) == promised or (promised and (is_first or flag(ckpt.declared, "finetune") is True)):
        return
    source = declared[name].source
    value = declared[name].value
    yield Finding(
        f"{name} is {value} in {source}, but {f'{len(keys):,} keys belong' if keys else 'no key belongs'} "
        "to an optimizer",
        at=Location(file=source, label=f"{source}: {name}"),
        identity=(name,),
        why="a load that follows this flag skips the optimizer state" if keys else "",
        notes=(("keys", first_few(keys)),) if keys else (),
        hint="set the flag to the value that the job that wrote the checkpoint used"
        if keys
        else "load with finetune or no_load_optim if you only want the weights",
    )
