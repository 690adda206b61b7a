from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from ckptlint.analysis.fit.trusted_config import is_known_model, main_params
from ckptlint.formats.strict_json import is_size
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import is_token_table

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_REPLACED = ("_token_id", "_token_ids", "_token_index")
_MODALITY = lazy_pattern("image|img|video|vision|audio|speech", re.IGNORECASE)
_LONGEST = 40


@rule("CFG008", "token-ids", Severity.ERROR, whole=True)
def token_ids(ckpt: Checkpoint) -> Iterator[Finding]:
    """A token of the tokenizer or of the configuration has no row in the embedding.

    What it checks:
        In an export, `bos_token_id`, `eos_token_id`, `pad_token_id` and `decoder_start_token_id` of `config.json` and
        of `generation_config.json` are below the rows of the embedding; so is every id of `tokenizer.json`, or of
        `vocab.json`, `vocab.txt` and `added_tokens.json` where there is none (up to 64 MiB each). A second embedding
        adds its rows. Fewer ids than rows are padding, and a negative id is none. Of an unknown model,
        ids without a tokenizer are info: they may be defaults that nobody set. Left out are ids that a model type
        has where nobody sets them, ids that another field names (`image_token_id`), and tokens for images, video and
        audio: the model replaces them before it embeds.
    Why it matters:
        The first text with such a token stops the forward pass: the index is out of range.
    Usual causes:
        Tokens were added and the embedding was not resized, or its new rows were trimmed; the tokenizer or the
        configuration is of another model.
    How to fix:
        Call `resize_token_embeddings` before the export, or take tokenizer and configuration of this model.
    See:
        ollama/ollama#8238, transformers.PreTrainedModel.resize_token_embeddings
    """
    if ckpt.config is None or not ckpt.is_export:
        raise NotApplicable("no export with a configuration")
    sections = dict(ckpt.config.sections())
    tables = [param.tensor for param in main_params(ckpt) if is_token_table(param.key)]
    tables = [table for table in tables if len(table.global_shape) == 2 and table.dtype in FLOATS]
    declared = max(chain.from_iterable(_ids(section.get("vocab_size")) for section in sections.values()), default=0)
    rows = sum({table.global_shape[0] for table in tables})
    if not declared or rows < declared:
        raise NotApplicable("no embedding has a row for every token of a declared vocabulary")
    lead = max(tables, key=lambda table: table.global_shape[0])
    legal = {number for section in sections.values() for number in _legal(section)}
    if (generation := ckpt.token_files.generation) is not None:
        sections[generation.file] = generation.values
    special: dict[int, list[str]] = defaultdict(list)
    for place, section in sections.items():
        for name in _SPECIAL:
            for number in _ids(section.get(name)):
                if number >= rows and number not in legal:
                    special[number].append(f"{name} of {place}")
    tokens = {number: token for number, token in ckpt.token_files.highest if number >= rows and number not in legal}
    tokens = {number: token for number, token in tokens.items() if not _MODALITY.search(token)}
    if tokens or special:
        # Of an unknown type nobody knows which ids are defaults that no one set.
        is_set = bool(tokens) or is_known_model(ckpt)
        highest = max(tokens or special)
        subject = f"the tokenizer has the id {highest} ({tokens[highest][:_LONGEST]})" if tokens else ""
        yield Finding(
            f"{subject or f'{special[highest][0]} is {highest}'}, but {lead.fqn} has {rows} row{'s' * (rows != 1)}",
            at=Location(lead),
            identity=tuple(map(str, sorted({*tokens, *special}))),
            kind="tokenizer" if tokens else "special",
            severity=None if is_set else Severity.INFO,
            notes=(
                ("tokens", first_names(f"{token[:_LONGEST]} {number}" for number, token in sorted(tokens.items()))),
                ("special", first_names(f"{name} {n}" for n, names in sorted(special.items()) for name in names)),
            ),
            hint="resize the embedding to the tokenizer and train the new rows, or take the tokenizer of this model"
            if tokens
            else "set it to an id of this model's tokenizer",
        )


def _legal(section: Mapping[str, Any]) -> Iterator[int]:
    """The ids of a section that need no row in the embedding: nobody set them, or the model replaces them."""
    from ckptlint.architecture.huggingface import default_ids

    yield from default_ids(str(section.get("model_type")))
    for name, value in section.items():
        if name.endswith(_REPLACED) and name not in _SPECIAL:
            yield from _ids(value)


def _ids(value: Any) -> list[int]:
    return [number for number in (value if isinstance(value, list) else [value]) if is_size(number)]
