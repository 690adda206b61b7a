from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("COM001", "completeness-marker", Severity.ERROR, always=True)
def completeness_marker(ckpt: Checkpoint) -> Iterator[Finding]:
    """A file that every finished save has is missing.

    What it checks:
        Payload files come with `.metadata`, or with the `__N.metadata` of every rank. A Megatron-Core torch_dist
        checkpoint also has `metadata.json` and its common state (`common.pt`, or the entry `common_state/shard_0_1`
        from 0.19 on). No `.metadata.tmp` is newer than `.metadata`: a warning where all payload files are of the later
        save, a note where none is.
        A step of transformers' Trainer has its `trainer_state.json`; one of prime-rl or VeOmni has `STABLE` or
        `checkpoint_manifest.json` if the step before it has one. Beside ColossalAI's `running_states.json` lie
        `modeling`, `optimizer` and `lr_scheduler`. No folder has the name of a step that is still being written
        (`step_30.tmp`, `ckpt-step-30.incomplete`).
        A step has the kinds of state beside the model that the step before it has (`optimizer.pt`, `rng_state.pth`),
        the whole folders of such state, and the files that all of several older steps have: a warning. So is an
        optimizer in a step without a model, and a scheduler of Trainer's, after a step, in one without an optimizer.
        The files `model-rank-R-part-P.safetensors` of vLLM's sharded_state count ranks and parts from 0 without a gap.
        A file of weights, an index or a step is no link that leads nowhere, and no download that did not end
        (`*.incomplete`) where nothing else of a checkpoint is there.
        A part that `model_index.json` names, or of diffusers in a step, holds weights beside its `config.json`.
    Why it matters:
        Each of these files is written last in its stage, so the save or the copy did not finish.
    Usual causes:
        The job was killed; nobody waited for an asynchronous save; a copy left dot files out.
    How to fix:
        Use the newest complete step, or copy again from where the checkpoint was written.
    See:
        megatron.core.dist_checkpointing.serialization.save
    """
    for problem in ckpt.problems_of("incomplete"):
        finding = Finding.of_problem(problem)
        yield replace(finding, severity=Severity.WARNING) if problem.outside_checkpoint else finding
