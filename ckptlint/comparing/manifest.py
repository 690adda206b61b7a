"""The tensors of checkpoints as a text that others are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.loaders.reference import manifest_text
from ckptlint.model.text import JSON_ESCAPE, inert


def manifest_of(side: Sequence[OpenedCheckpoint], values: bool, rows: bool) -> tuple[str, list[str]]:
    """The manifest as JSON, with digests of `values` and of `rows` if asked; or "" and sentences on what is unread."""
    checkpoints = [item.ckpt for item in side]
    if not values:
        return inert(manifest_text(checkpoints), JSON_ESCAPE), []
    from ckptlint.comparing.values.compare import row_hashes_of
    from ckptlint.seals.row_hashes import digest, new_salt

    salt = new_salt()
    row_words, unread = row_hashes_of(side, salt)
    if unread:
        return "", unread
    digests = {key: {dtype: digest(words) for dtype, words in by_dtype.items()} for key, by_dtype in row_words.items()}
    return inert(manifest_text(checkpoints, digests, row_words if rows else None, salt), JSON_ESCAPE), []
