"""COM010: the vocabulary has the rows that the job declared."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import judged_shapes
from ckptlint.analysis.inventory import Param
from ckptlint.analysis.trusted_config import main_params, number, trusted, trusted_topology
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule

_TABLES = frozenset({"word_embeddings", "embed_tokens", "tok_embeddings", "wte", "output_layer", "lm_head"})
_TP_LIMIT = 64
_ADDED_TOKENS = 4096


@rule("COM010", "vocab-rows", Severity.ERROR)
def vocab_rows(ckpt: Checkpoint) -> Iterator[Finding]:
    """The embedding or the output layer has a multiple of the declared vocabulary's rows.

    What it checks:
        The rows are vocab_size, padded_vocab_size, or vocab_size rounded up to make_vocab_size_divisible_by times any
        tensor-parallel size. TP times the padded size, TP > 1, is an error; another whole multiple, or the rows of a
        single tensor-parallel rank, are a warning; other numbers far above the padded size are a note. A few thousand
        rows more are tokens that were added.
    Why it matters:
        The load fails with a size mismatch, or the tail of the table is rows that were never trained.
    Usual causes:
        The padded size was multiplied by TP a second time, or the padded size of a shard was used for offsets.
    How to fix:
        Declare the padded size once, as a global size, and save again.
    See:
        megatron.training.tokenizer.tokenizer._vocab_size_with_padding
    """
    declared = trusted(ckpt)
    vocab, padded = number(declared, "vocab"), number(declared, "padded_vocab")
    if vocab is None and padded is None:
        raise NotApplicable("no configuration declares a vocabulary that may be trusted")
    axis = trusted_topology(ckpt).get("tp")
    tp = axis.size if axis is not None else 1
    divisor = number(declared, "vocab_divisor")
    base = padded or _rounded(vocab or 0, (divisor or 1) * tp)
    known = judged_shapes(ckpt)
    tables = [p for p in main_params(ckpt) if not p.key.block and _TABLES & set(p.key.path.split("."))]
    tables = [param for param in tables if param.tensor.fqn not in known]
    for param in tables:
        if param.key.function in ("embedding", "output") and len(param.own_shape) == 2:
            rows = param.own_shape[0]
            if rows not in (vocab, base) and not _is_rounded(rows, vocab, divisor):
                yield from _judged(ckpt, param, rows, base, tp, padded is not None)


def _judged(ckpt: Checkpoint, param: Param, rows: int, base: int, tp: int, is_padded: bool) -> Iterator[Finding]:
    what = "the padded vocabulary" if is_padded else "the vocabulary"
    if rows % base == 0:
        times = rows // base
        twice = times == tp
        yield _finding(
            ckpt,
            param,
            f"{rows:,} rows{{of}} are {times} times {what} of {base:,}" + (f", and TP is {tp}" if twice else ""),
            severity=None if twice else Severity.WARNING,
            tp=tp,
            hint="the padded size was multiplied by TP a second time: declare it once, as the global size"
            if twice
            else "find out which size the writer declared for this table",
        )
    elif tp > 1 and rows * tp == base:
        yield _finding(
            ckpt,
            param,
            f"{rows:,} rows{{of}} are 1/{tp} of {what} of {base:,}, and TP is {tp}",
            severity=Severity.WARNING,
            tp=tp,
            hint="the rows of one tensor-parallel rank were declared as the whole table: declare the axis, save again",
        )
    elif rows - base > max(_ADDED_TOKENS, base // 16):
        yield _finding(
            ckpt,
            param,
            f"{rows:,} rows{{of}} are {rows - base:,} more than {what} of {base:,}",
            severity=Severity.INFO,
            tp=tp,
            hint="",
        )


def _finding(ckpt: Checkpoint, param: Param, message: str, severity: Severity | None, tp: int, hint: str) -> Finding:
    names = ("vocab", "padded_vocab", "vocab_divisor")
    shown = ", ".join(f"{n} {ckpt.declared[n].value} ({ckpt.declared[n].source})" for n in names if n in ckpt.declared)
    notes: tuple[Note, ...] = (("declared", f"{shown}, tp {tp}"),)
    return Finding(message, at=Location.of(param.tensor), severity=severity, notes=notes, hint=hint)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _is_rounded(rows: int, vocab: int | None, divisor: int | None) -> bool:
    """Whether padding for some tensor-parallel size explains the rows."""
    if vocab is None or divisor is None:
        return False
    return any(rows == _rounded(vocab, divisor * tp) for tp in range(1, _TP_LIMIT + 1))
