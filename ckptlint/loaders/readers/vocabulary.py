"""What an export says of its tokens beside the configuration: the tokenizer, and the ids that generation uses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from heapq import nlargest
from typing import Any

from ckptlint.errors import ForeignError, LimitError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import paused_gc
from ckptlint.formats.strict_json import is_size
from ckptlint.loaders.readers.common_state import read_model_config
from ckptlint.model import Checkpoint, ModelConfig, Problem, TokenFiles
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.config_fields import GENERATION_CONFIG, MODEL_CONFIG
from ckptlint.vocabulary.keys import is_token_table, parse

_TOKENIZER = "tokenizer.json"
_SLOW = ("vocab.json", "vocab.txt", "added_tokens.json")  # what stands in its place
_LIMIT = 64 * 1024**2
_SHOWN = 64
_MERGES = lazy_pattern(rb'"merges"\s*:\s*\[')  # most of the file, and last in it


def with_vocabulary(folder: Folder, ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint with the token files beside an export; `not_looked_at` names what is of no known form.

    Raises AccessError where a read is refused.
    """
    if not (ckpt.is_export and ckpt.config and ckpt.config.file == MODEL_CONFIG):
        return ckpt
    names = [name for name in (GENERATION_CONFIG, _TOKENIZER, *_SLOW) if folder.stat(name)[0] in READABLE]
    names = [name for name in names if name not in _SLOW or _TOKENIZER not in names]
    has_table = names and any(is_token_table(parse(name)) for name in ckpt.tensors)
    token_files = TokenFiles()
    for name in names if has_table else ():
        try:
            if name != GENERATION_CONFIG:
                highest = isolated(partial(highest_tokens, folder, name), folder.size(name))
                token_files = token_files._replace(highest=tuple(nlargest(_SHOWN, {*token_files.highest, *highest})))
            else:
                values = isolated(partial(read_model_config, folder, name), folder.size(name))
                token_files = token_files._replace(generation=ModelConfig(name, values))
        except ForeignError as error:
            ckpt = replace(ckpt, not_looked_at=(*ckpt.not_looked_at, f"the token ids in {name}, since it {error}"))
        except (LimitError, UnreadableError) as error:
            why = "a load of the model fails at it, or takes other tokens"
            unread = Problem("unread", name, f"{name} {error}", why=why)
            ckpt = replace(ckpt, problems=[*ckpt.problems, unread])
    return replace(ckpt, token_files=token_files)


def highest_tokens(folder: Folder, name: str = _TOKENIZER) -> tuple[tuple[int, str], ...]:
    """The 64 highest ids of a tokenizer's file and their tokens, printable, the highest first; () where it has none.

    Raises LimitError or UnreadableError for a file that is too large or damaged, ForeignError for an unknown form.

    Source: tokenizers 0.22 (BPE, WordPiece, WordLevel: token -> id; Unigram: a list of tokens with their scores);
    transformers 5.23, models/bert/tokenization_bert.py: `vocab.txt` has a token in each line, numbered from 0
    """
    try:
        with paused_gc():
            if name == "vocab.txt":
                lines = folder.read(name, _LIMIT).decode().rstrip("\n").split("\n")
                return _highest({"model": {"vocab": [[line] for line in lines]}})
            if name != _TOKENIZER:
                return _highest({"model": {"vocab": json.loads(folder.read(name, _LIMIT))}})
            return _highest(json.loads(_without_merges(folder.read(_TOKENIZER, _LIMIT))))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"is damaged: it is no text of a tokenizer ({printable(str(error)[:200])})") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise ForeignError(f"is no tokenizer of a known form ({printable(str(error)[:200])})") from None


def _without_merges(text: bytes) -> bytes:
    """The text of a tokenizer without its merges, where they stand last in it; in linear time, whatever the text is."""
    end = text
    for bracket in (b"}", b"}", b"]"):
        end = end.rstrip()
        if not end.endswith(bracket):
            return text
        end = end[:-1]
    starts = [match.end() for match in _MERGES.finditer(end)]
    return end[: starts[-1]] + b"]}}" if starts else text


def _highest(document: dict[str, Any]) -> tuple[tuple[int, str], ...]:
    vocab = (document.get("model") or {}).get("vocab") or {}
    tokens: dict[int, str] = {}
    if isinstance(vocab, list):
        tokens = {number: vocab[number][0] for number in range(len(vocab))[-_SHOWN:]}
    else:
        highest = set(nlargest(_SHOWN, (number for number in vocab.values() if is_size(number))))
        tokens = {number: token for token, number in vocab.items() if number in highest}
    tokens |= {token["id"]: token["content"] for token in document.get("added_tokens") or () if is_size(token["id"])}
    return tuple((number, printable(str(tokens[number]))) for number in nlargest(_SHOWN, tokens))
