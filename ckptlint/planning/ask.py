"""Turns the user's request into a plan: form of the job, number of ranks, nodes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

from ckptlint.errors import ConfigError
from ckptlint.model import Checkpoint
from ckptlint.model.text import bytes_in
from ckptlint.planning.job import Job
from ckptlint.planning.megatron import MEGATRON_AXES, Version, constraints
from ckptlint.planning.outcome import Constraint, Plan
from ckptlint.planning.quick import axis_sizes, quick_job
from ckptlint.planning.rank_files import refusals
from ckptlint.planning.unrequested_keys import unrequested_keys
from ckptlint.planning.verdict import plan_of
from ckptlint.vocabulary.keys import parse


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The user's options for a plan, shared by the command line and the API.

    Attributes:
        to: sizes of axes (`dp=8,tp=2`), or a function of the job (`job.py:state_dict`), which is run; None for as many
            ranks as saved, under FSDP.
        world: ranks of the job, for a function.
        mesh: the axes of the mesh that the function is given (`dp=4,tp=2`); one axis `dp` otherwise.
        nodes, ranks_per_node: number of nodes, and of ranks on each; either is enough.
        from_nodes: number of nodes that saved, each of which has only its own files.
        give_up: state that Megatron-LM does not load: `optim`, `rng` (--no-load-optim, --no-load-rng).
        megatron: the version of megatron-core that loads (`0.16`); None for any from the one that saved on.
        timeout: seconds after which a function is given up.
        memory: what a rank has for the state that it loads (`80GiB`).
    """

    to: str | None = None
    world: int | None = None
    mesh: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    from_nodes: int | None = None
    give_up: Collection[str] = ()
    megatron: str | None = None
    timeout: float = 600
    memory: str | None = None


def make_plan(ckpt: Checkpoint, asked: PlanRequest) -> Plan:
    """Whether the checkpoint loads into a job, and what each of its ranks reads, or ConfigError, or BudgetError."""
    for name in ("world", "nodes", "ranks_per_node", "from_nodes"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name.replace('_', '-')} is {value}: give a whole number from 1 up")
    memory = None if asked.memory is None else bytes_in(asked.memory)
    if asked.memory is not None and not memory:
        raise ConfigError(f"memory is {asked.memory!r}: give an amount for each rank, --memory 80GiB")
    is_exact = asked.to is not None and ":" in asked.to
    if not ckpt.is_torch_dist and (asked.megatron or asked.give_up):
        raise ConfigError("--megatron, --no-load-optim and --no-load-rng are for checkpoints of Megatron-Core only")
    if unknown := {*asked.give_up} - {"optim", "rng"}:
        raise ConfigError(f"a load can leave out optim and rng, not {sorted(unknown)[0]!r}")
    if asked.to is not None and is_exact:
        job = _exact(ckpt, asked.to, asked)
        job = replace(job, constraints=(*unrequested_keys(ckpt, job), *job.constraints))
    elif asked.mesh is not None:
        raise ConfigError("--mesh needs a function: --to job.py:state_dict --mesh dp=4,tp=2")
    else:
        job = _quick(ckpt, asked.to, asked.world)
    if ckpt.is_torch_dist:
        job = _of_megatron(ckpt, job, frozenset(asked.give_up), asked.megatron)
    if ckpt.rank_files is not None:
        job = replace(job, constraints=(*refusals(ckpt, axis_sizes(job.to), job.world), *job.constraints))
    return replace(plan_of(ckpt, job, _per_node(ckpt, job, asked), asked.from_nodes), memory=memory)


def _exact(ckpt: Checkpoint, to: str, asked: PlanRequest) -> Job:
    """The job of a plan that torch itself makes, for a model that the user names."""
    from ckptlint.planning.exact import axes_of, exact_job

    world, mesh = asked.world, asked.mesh
    if mesh is None and world is None:
        raise ConfigError(f"for how many ranks should {to} run? give --world 8, or --mesh dp=4,tp=2")
    axes = {"dp": world or 1} if mesh is None else axes_of(mesh)
    if world is not None and prod(axes.values()) != world:
        raise ConfigError(f"the mesh {mesh} has {prod(axes.values()):,} ranks, but --world is {world:,}")
    if ckpt.is_torch_dist:
        raise ConfigError(
            "Megatron-Core loads its checkpoints with its own planner: name sizes of axes, --to tp=2,pp=2,dp=4"
        )
    if ckpt.storages is not None:
        raise ConfigError(
            "torch.distributed.checkpoint does not load files of torch.save: name sizes of axes, --to dp=4,tp=2"
        )
    keys = (*ckpt.tensors, *(item.fqn for item in ckpt.byte_objects))
    return exact_job(to, axes, keys, asked.ranks_per_node or 8, asked.timeout)


def _quick(ckpt: Checkpoint, to: str | None, world: int | None) -> Job:
    """The job of a plan from sizes of axes; without any, the layout that saved."""
    if to is not None:
        job = quick_job(ckpt, to)
        if world not in (None, job.world):
            raise ConfigError(f"{to} has {job.world:,} ranks, but --world is {world:,}")
        return job
    # Without --to the most likely job is the one that saved. Outside Megatron-Core only the number of ranks is stored,
    # not the mesh, so FSDP over all of them is assumed.
    if ckpt.is_torch_dist and world is None and "tp" in ckpt.topology:
        axes = (f"{axis}={ckpt.topology[axis].size}" for axis in MEGATRON_AXES if axis in ckpt.topology)
        to, what = ",".join(axes), "the layout that saved"
    else:
        saved = world or (ckpt.topology["world"].size if "world" in ckpt.topology else 0)
        if not saved:
            raise ConfigError("the checkpoint does not say how many ranks saved it: name a job, --to dp=8")
        to, what = f"dp={saved}", f"{saved:,} ranks under FSDP"
    job = quick_job(ckpt, to)
    guess = Constraint("note", f"--to names no job, so this plan takes {what}", guessed=True)
    return replace(job, constraints=(guess, *job.constraints))


def _of_megatron(ckpt: Checkpoint, job: Job, give_up: frozenset[str], megatron: str | None) -> Job:
    """The job with Megatron-Core's own constraints, without requests for state that it gives up."""
    reader: Version | None = None
    if megatron is not None:
        match = re.fullmatch(r"0\.([0-9]{1,3})(?:\..*)?", megatron)
        if match is None:
            raise ConfigError(f"{megatron!r} is not a version of megatron-core such as 0.16")
        reader = (0, int(match[1]))
    requests = job.requests
    if "optim" in give_up:
        requests = [request for request in requests if parse(request.key).kind != "optimizer"]
    megatron_constraints = constraints(ckpt, axis_sizes(job.to), give_up, reader)
    return replace(job, requests=requests, constraints=(*megatron_constraints, *job.constraints))


def _per_node(ckpt: Checkpoint, job: Job, asked: PlanRequest) -> int | None:
    """Ranks on a node; None where nodes do not matter."""
    nodes, ranks_per_node, from_nodes = asked.nodes, asked.ranks_per_node, asked.from_nodes
    if nodes is not None and ranks_per_node is not None and nodes * ranks_per_node != job.world:
        raise ConfigError(
            f"{nodes:,} nodes with {ranks_per_node:,} ranks each do not make the {job.world:,} ranks of the job"
        )
    if ranks_per_node is not None:
        return ranks_per_node
    if nodes is None and from_nodes is not None:
        saved = ckpt.topology["world"].size if "world" in ckpt.topology else job.world
        return -(-saved // from_nodes)
    return None if nodes is None else -(-job.world // nodes)
