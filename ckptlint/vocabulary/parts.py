"""The parts that a step needs so that a job can go on from it, told by names of keys and by families of files."""

from __future__ import annotations

import re

from ckptlint.vocabulary.keys import parse

PARTS = ("model", "optimizer", "scheduler", "rng", "dataloader")
"""What `ckptlint latest --require` takes, in the order of reports."""

_RUNTIME = {
    "scheduler": re.compile(r"(lr_|opt_param_)?schedulers?(_\d+)?([./].*)?"),
    "rng": re.compile(r"rng(_state)?([./].*)?|random_states?([./].*)?"),
    "dataloader": re.compile(r"(train_?)?data_?loader\w*([./].*)?|sampler([./].*)?"),
}

_FAMILIES = {
    "weights, pickled": "model",
    "optimizer state": "optimizer",
    "scheduler state": "scheduler",
    "random state": "rng",
    "dataloader state": "dataloader",
    "sampler state": "dataloader",
}


def part_of_key(fqn: str) -> str | None:
    """The part that a key belongs to, None for all else.

    Source:
        torchtitan 0.3 (`lr_scheduler`, `dataloader.dp_rank_N`), Megatron-LM (`opt_param_scheduler`, `rng_state`)

    >>> part_of_key("optimizer.state.exp_avg.w"), part_of_key("dataloader.dp_rank_0"), part_of_key("train.step")
    ('optimizer', 'dataloader', None)
    """
    key = parse(fqn)
    if key.kind != "runtime":
        return key.kind
    return next((part for part, pattern in _RUNTIME.items() if pattern.fullmatch(key.path)), None)


def part_of_file(family: str) -> str | None:
    """The part that a family of step files (`vocabulary.step_files`) holds, None for all else.

    >>> part_of_file("random state"), part_of_file("tokenizer")
    ('rng', None)
    """
    return _FAMILIES.get(family)
