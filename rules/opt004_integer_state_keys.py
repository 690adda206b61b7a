from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.model import Checkpoint
from ckptlint.model.text import ranges
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import parse


@rule("OPT004", "integer-state-keys", Severity.INFO)
def integer_state_keys(ckpt: Checkpoint) -> Iterator[Finding]:
    """Optimizer states are keyed by integers although there are several stages or optimizers.

    What it checks:
        Keys `optimizer.state.<int>.<name>` occur only where there is one pipeline stage and one optimizer.
    Why it matters:
        Integer ids follow the order in which parameters were created, so after a change of stages or parameter groups
        they belong to other parameters.
    Usual causes:
        The job saved the raw `optimizer.state_dict()`.
    How to fix:
        Save the states by name, with torch's get_optimizer_state_dict.
    See:
        torch.distributed.checkpoint.state_dict.get_optimizer_state_dict
    """
    numbered = inventory_of(ckpt).numbered
    if not numbered:
        raise NotApplicable("no optimizer state is keyed by an integer")
    keys = [parse(tensor.fqn) for tensor in numbered]
    stages = ckpt.topology["pp"].size if "pp" in ckpt.topology else 1
    optimizers = len({(key.scope, key.path.partition(".")[0]) for key in keys})
    if stages < 2 and optimizers < 2:
        return
    ids = {int(number) for key in keys if (number := key.path.split(".state.", 1)[-1].split(".")[0]).isdecimal()}
    several = [f"{stages} pipeline stages"] * (stages > 1) + [f"{optimizers} optimizers"] * (optimizers > 1)
    message = f"{len(numbered)} states are keyed by integers ({ranges(ids)}) in a job with {' and '.join(several)}"
    hint = "load with the same layout: after a change of stages or groups these states go to other parameters"
    yield Finding(message, at=Location(numbered[0]), hint=hint)
