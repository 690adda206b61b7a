from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.trusted_config import flag, trusted, trusted_topology
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_RANDOM = ("attention_dropout", "hidden_dropout", "router_jitter")


@rule("OBJ005", "rng-axis", Severity.WARNING)
def rng_axis(ckpt: Checkpoint) -> Iterator[Finding]:
    """Ranks that draw their own random numbers share one saved random state.

    What it checks:
        `rng_state` has a third axis if the job has EP > 1 or data_parallel_random_init: Megatron-Core 0.16 then cuts it
        by (PP, TP, DP x CP), other versions only by (PP, TP). It is info unless the configuration shows that random
        numbers matter (that flag, dropout, jitter at the router's input). Not judged where the expert ranks are the
        tensor ranks, where EP is not declared, or after a finetuning start.
    Why it matters:
        Ranks that differ by expert or data parallelism resume with the same random state, so dropout hits the same
        activations.
    Usual causes:
        Most versions of Megatron-Core treat the random state as a replica over data and context parallelism.
    How to fix:
        Nothing else of this checkpoint is affected; only the independence of the ranks is lost. Only Megatron-Core 0.16
        saves the third axis, and other versions cannot load it.
    See:
        megatron.training.checkpointing.get_rng_state
    """
    grids = {shape for key, shape in ckpt.objects.grids if key == "rng_state"}
    if not grids:
        raise NotApplicable("there is no sharded random state")
    declared, topology = trusted(ckpt), trusted_topology(ckpt)
    random_init = flag(declared, "data_parallel_random_init") is True
    if "ep" not in topology and not random_init:
        raise NotApplicable("the size of expert parallelism is not known")
    if "world" not in topology or topology["world"].source == "files":
        raise NotApplicable("the number of ranks is not known")
    if flag(declared, "finetune") is True:
        raise NotApplicable("a finetuning start does not load the random state")
    ep, world = topology["ep"].size if "ep" in topology else 1, topology["world"].size
    grid = next(iter(grids))
    if len(grids) > 1 or len(grid) != 2 or not (ep > 1 or random_init):
        return
    cells = grid[0] * grid[1]
    if world <= cells:
        return
    values = {name: declared[name].value for name in _RANDOM if name in declared}
    matters = [name for name, value in values.items() if isinstance(value, (int, float)) and value > 0]
    matters += ["data_parallel_random_init"] if random_init else []
    because = f"EP is {ep}" if ep > 1 else "data_parallel_random_init is set"
    yield Finding(
        f"{cells:,} random state{' is' if cells == 1 else 's are'} stored for {world:,} ranks, though {because}",
        at=Location("rng_state", label=f"{ckpt.metadata_file}: grid {shape_text(grid)} of pipeline and tensor ranks"),
        severity=None if matters else Severity.INFO,
        notes=(
            ("ranks", f"{world - cells:,} of {world:,} resume with the random state of another rank"),
            ("random", ", ".join(matters) if matters else "no dropout, jitter or random init is declared"),
        ),
        hint="resume from it if equal random numbers do no harm: nothing else in this checkpoint is affected",
    )
