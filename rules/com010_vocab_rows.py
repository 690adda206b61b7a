from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import judged_shapes
from ckptlint.analysis.fit.trusted_config import is_defined, main_params, number, trusted, trusted_topology
from ckptlint.analysis.optimizer.inventory import Param
from ckptlint.model import Checkpoint
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS

_TABLES = frozenset({"word_embeddings", "embed_tokens", "tok_embeddings", "wte", "output_layer", "lm_head"})
_TP_LIMIT = 64
_ADDED_TOKENS = 4096


@rule("COM010", "vocab-rows", Severity.ERROR)
def vocab_rows(ckpt: Checkpoint) -> Iterator[Finding]:
    """The embedding or output layer has too many or too few rows for the vocabulary.

    What it checks:
        The rows are vocab_size, padded_vocab_size, or vocab_size rounded up to make_vocab_size_divisible_by times any
        tensor-parallel size. TP times the padded size, TP > 1, is an error; another whole multiple, or the rows of a
        single tensor-parallel rank, is a warning; other numbers far above the padded size are info. A few thousand
        further rows are added tokens. A module with a part of its own in the configuration may have that vocabulary.
        In the `config.json` of an unknown model, `vocab_size` may count something else: these are info.

        If that finds nothing, or nothing is declared, embedding and output layer have equal rows (else a warning):
        exactly in Megatron's formats, elsewhere up to a factor that is no whole number, since some models have a
        vocabulary for each.
    Why it matters:
        Loading fails with a size mismatch, or the last rows of the table were never trained.
    Usual causes:
        The padded size was multiplied by TP a second time, or the padded size of one shard was used for the offsets.
    How to fix:
        Declare the padded size once, as a global size, and save again.
    See:
        megatron.training.tokenizer.tokenizer._vocab_size_with_padding
    """
    tables = [p for p in main_params(ckpt) if not p.key.block and _TABLES & set(p.key.path.split("."))]
    tables = [p for p in tables if p.key.function in ("embedding", "output") and len(p.own_shape) == 2]
    tables = [p for p in tables if p.tensor.dtype in FLOATS]  # codes have rows of their own
    if not tables:
        raise NotApplicable("there is neither an embedding nor an output layer whose weights are floating point")
    known = judged_shapes(ckpt)  # CFG003 reports these
    tables = [param for param in tables if param.tensor.fqn not in known]
    findings = list(_against_declared(ckpt, tables))
    yield from findings or _unequal_tables(ckpt, tables)


def _against_declared(ckpt: Checkpoint, tables: list[Param]) -> Iterator[Finding]:
    declared = trusted(ckpt)
    vocab, padded = number(declared, "vocab"), number(declared, "padded_vocab")
    if vocab is None and padded is None:
        return
    axis = trusted_topology(ckpt).get("tp")
    tp = axis.size if axis is not None else 1
    divisor = number(declared, "vocab_divisor")
    base = padded or _rounded(vocab or 0, (divisor or 1) * tp)
    for param in tables:
        rows = param.own_shape[0]
        # padding for some tensor-parallel size explains the rows
        padding = range(1, _TP_LIMIT + 1) if vocab is not None and divisor is not None else ()
        is_padded = any(rows == _rounded(vocab or 0, (divisor or 0) * size) for size in padding)
        if rows not in (vocab, base, *_module_vocabularies(ckpt, param)) and not is_padded:
            yield from _row_findings(ckpt, param, rows, base, tp, padded is not None)


def _module_vocabularies(ckpt: Checkpoint, param: Param) -> Iterator[object]:
    """The vocabulary sizes in the configuration's sections for a table's modules (`qformer_config` for `qformer`)."""
    for name in param.tensor.fqn.split("."):
        if ckpt.config is not None and isinstance(section := ckpt.config.values.get(f"{name}_config"), dict):
            yield section.get("vocab_size")


def _unequal_tables(ckpt: Checkpoint, tables: list[Param]) -> Iterator[Finding]:
    """A finding if the model's only embedding and only output layer cannot belong to one vocabulary."""
    names = [p.key.path for p in main_params(ckpt) if not p.key.block and len(p.own_shape) == 2]
    if sum("embed" in name and "position" not in name for name in names) > 1:
        return  # tables of several vocabularies: text, audio, images
    embeddings, outputs = ([p for p in tables if p.key.function == name] for name in ("embedding", "output"))
    if len(embeddings) != 1 or len(outputs) != 1 or embeddings[0].own_shape[1] != outputs[0].own_shape[1]:
        return
    few, many = sorted((embeddings[0], outputs[0]), key=lambda param: param.own_shape[0])
    rows, more = few.own_shape[0], many.own_shape[0]
    times, rest = divmod(more, rows) if rows else (0, 1)
    if rows == more or times > _TP_LIMIT or (rest and not ckpt.format.startswith("torch_")):
        return  # the output of a value head has one row
    yield Finding(
        f"{more:,} rows{{of}} are {more - rows:,} more than {few.tensor.fqn} has"
        if rest
        else f"{more:,} rows{{of}} are {times} times those of {few.tensor.fqn}",
        at=Location(many.tensor),
        confidence="likely",
        notes=(("rows", f"{rows:,} of {few.tensor.fqn}, {more:,} of {many.tensor.fqn}"),),
        why="both are tables of one vocabulary, so one of them was padded twice or cut",
        hint="compare with vocab_size and its padding in the job's configuration",
        inferred_from=f"the rows of {few.tensor.fqn}",
    )


def _row_findings(ckpt: Checkpoint, param: Param, rows: int, base: int, tp: int, is_padded: bool) -> Iterator[Finding]:
    """Findings on a number of rows that is not declared: copies, one rank's part, or too much padding."""
    # Up to a few thousand rows, or 1/16, above the padded size are tokens that somebody added, which is no fault.
    what = "the padded vocabulary" if is_padded else "the vocabulary"
    times, hint = f"{rows // base} times {what} of {base:,}", ""
    confidence: Confidence = "likely"
    if rows == base * tp:
        times, confidence = f"{times}, and TP is {tp}", "certain"
        hint = "declare the padded size once, as the global size: it was multiplied by TP a second time"
    elif rows % base == 0:
        hint = "find out which size the writer declared for this table"
    elif tp > 1 and rows * tp == base:
        times = f"1/{tp} of {what} of {base:,}, and TP is {tp}"
        hint = "declare the tensor-parallel axis and save again: one rank's rows were declared as the whole table"
    elif rows - base > max(_ADDED_TOKENS, base // 16):
        times, confidence = f"{rows - base:,} more than {what} of {base:,}", "possible"
    else:
        return
    names = ("vocab", "padded_vocab", "vocab_divisor")
    shown = ", ".join(f"{n} {ckpt.declared[n].value} ({ckpt.declared[n].source})" for n in names if n in ckpt.declared)
    yield Finding(
        f"{rows:,} rows{{of}} are {times}",
        at=Location(param.tensor),
        severity=None if all(is_defined(ckpt, ckpt.declared.get(name)) for name in names) else Severity.INFO,
        confidence=confidence,
        notes=(("declared", f"{shown}, tp {tp}"),),
        hint=hint,
    )


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
