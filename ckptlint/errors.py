"""What ckptlint raises: one sentence, with the path and what to do; nothing here knows about click or exit codes."""

from __future__ import annotations

TYPE_CHECKING = False  # with `-m` the working directory is still on the import path: its `typing.py` would run
if TYPE_CHECKING:
    from typing import Any


class CkptlintError(Exception):
    """The root of every error that a caller of ckptlint may want to catch."""


class ConfigError(CkptlintError):
    """An option, a rule code or a setting is wrong; the command line exits with 2."""


class NothingToCheckError(CkptlintError):
    """No checkpoint is under a path; the command line exits with 3.

    Attributes:
        report: what `ckptlint.check` found at its other paths; None of another function.
    """

    report: Any = None


class AccessError(CkptlintError):
    """The operating system or the network refused a read; the verdict is incomplete, exit 4."""


class UnknownLayoutError(AccessError):
    """Payload is under a path, and nobody knows how it belongs together; the verdict is incomplete, exit 4."""


class UnreadableError(CkptlintError):
    """A file is not what its name promises: damaged, truncated, or of another format. Becomes SAF002.

    Attributes:
        position: first byte that could not be understood, when known.
    """

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


GIT_LFS_POINTER = "is a Git LFS pointer, not the file itself"
"""What an UnreadableError says of a text that stands for a large file."""

LINK_AS_TEXT = "holds the path of a link, not the file it leads to"
"""What it says of a link that was checked out or copied as text."""


class ForeignError(UnreadableError):
    """A file holds something else than what its reader is for; by its name it may be either."""


class ScriptError(UnreadableError):
    """A file is TorchScript, which ckptlint knows and does not judge. Becomes SAF004, beside a checkpoint SAF002."""


class LimitError(UnreadableError):
    """Reading on would exceed a resource limit. Becomes SAF003."""


class BudgetError(CkptlintError):
    """A rule would need more work than it may do to be sure, or has nothing to compare; the verdict is incomplete."""


class ReaderError(CkptlintError):
    """A loader crashed; the verdict is incomplete, exit 4."""


class OwnFileError(Exception):
    """A file of ckptlint itself is missing or broken, exit 4; no `CkptlintError`, which may be about a checkpoint."""


class CheckpointError(CkptlintError):
    """Raised by `Report.raise_for_findings` when the checkpoint is not good enough."""
