"""The parts that a step needs so that a job can go on from it, known by names of keys and by families of files."""

from __future__ import annotations

from collections.abc import Sequence

from ckptlint.model.text import join_words
from ckptlint.vocabulary.frameworks import world
from ckptlint.vocabulary.keys import parse

PARTS = ("model", "optimizer", "scheduler", "rng", "dataloader")
"""What `ckptlint latest --require` takes, in the order of reports."""


def not_stored(parts: Sequence[str]) -> str:
    """The sentence on parts that a step lacks."""
    words = {"model": "model", "rng": "random state"}
    return f"no {join_words([words.get(part, f'{part} state') for part in parts], 'and no')} is stored"


def part_of_key(fqn: str) -> str | None:
    """The part that a key belongs to, None for all else.

    >>> part_of_key("optimizer.state.exp_avg.w"), part_of_key("dataloader.dp_rank_0"), part_of_key("train.step")
    ('optimizer', 'dataloader', None)
    """
    key = parse(fqn)
    if key.kind != "runtime":
        return key.kind
    return next((part for part, pattern in world().keys.items() if pattern.fullmatch(key.path)), None)


def part_of_file(family: str) -> str | None:
    """The part that a family of step files (`vocabulary.frameworks`) holds, None for all else.

    >>> part_of_file("random state"), part_of_file("tokenizer")
    ('rng', None)
    """
    return next((known.part for known in world().files if known.name == family and known.part), None)
