"""The files that torch.save made before 1.6, and still makes on request: pickles in a row, then the storages."""

from __future__ import annotations

import pickletools

from ckptlint.errors import UnreadableError

START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickle of the magic number, with which such a file starts."""

PICKLES_LIMIT = 16 * 1024**2
"""Bytes at the start of a file in which its pickles are looked for; the tensors follow them."""

_PICKLES = 5


def split_pickles(data: bytes) -> list[bytes]:
    """The pickles that `torch.load` reads one by one: magic number, protocol, system, object, keys of the storages.

    Args:
        data: the first bytes of a file that begins with `START`.

    Raises:
        UnreadableError: the bytes end before the last of them, or inside it is no pickle.

    Source:
        torch.serialization._legacy_save
    """
    found = []
    at = 0
    for _ in range(_PICKLES):
        end = at
        try:
            for opcode, _, position in pickletools.genops(data[at:]):
                if opcode.name == "STOP":
                    end = at + (position or 0) + 1
        except (ValueError, UnicodeError) as error:
            if "unknown" in str(error):
                raise UnreadableError(f"stops being a pickle at byte {at:,}", at) from None
        if end == at:
            raise UnreadableError(f"ends at byte {len(data):,} inside a pickle (no STOP)", len(data))
        found.append(data[at:end])
        at = end
    return found
