"""Words for tensors of a model, and for the config fields that decide their existence and shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ckptlint.analysis.fit.judgement import Fit, numbered_layer
from ckptlint.grouping import grouped
from ckptlint.model.text import first_names, fold_names, plural, printable, ranges
from ckptlint.rule import Note

_SHOWN = 6
_CORE = (
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("hidden_size", "n_embd", "d_model"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("vocab_size",),
)


def keys_in_words(fit: Fit, names: Collection[str], whole: Mapping[str, Sequence[int]]) -> str:
    """Expected keys in few words: what is outside of layers, then those that `whole_layers` found, then roles."""
    lost = set(names)
    globs = []
    for block, numbers in whole.items():
        count = sum(1 for name in lost if (at := numbered_layer(name)) and at == (block, numbers[0]))
        shown = fit.shown(block)
        some = f"{shown}.{{{ranges(numbers)}}}.* ({plural(count, 'key')} each)"
        globs.append(some if len(numbers) > 1 else f"{shown}.{numbers[0]}.*")
    gone = {(block, number) for block, numbers in whole.items() for number in numbers}
    rest = [name for name in names if numbered_layer(name) not in gone]
    globs = [*fold_names(fit.shown(n) for n in rest if numbered_layer(n) is None), *globs]
    globs += fold_names(fit.shown(n) for n in rest if numbered_layer(n) is not None)
    return first_names(globs, _SHOWN, "pattern")


def whole_layers(fit: Fit, lost: Collection[str]) -> dict[str, list[int]]:
    """Block of layers (`model.layers`) -> the numbers of those of which every tensor is among some keys."""
    needed, missing = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for name, tensor in fit.expected.tensors.items():
        at = numbered_layer(name)
        if at is not None and tensor.needed:
            needed[at] += 1
            missing[at] += name in lost
    return grouped(at for at, count in needed.items() if count > 1 and missing[at] == count)


def field_text(fit: Fit, name: str) -> str:
    """A field with its value: `tie_word_embeddings false`."""
    value = fit.expected.fields.get(name)
    shown = str(value).lower() if isinstance(value, bool) else "not given" if value is None else str(value)
    return f"{name} {printable(shown)[:40]}"


def core_note(fit: Fit) -> Note:
    """The fields that a model's size is known by."""
    named = [next((n for n in names if n in fit.expected.fields), "") for names in _CORE]
    return ("declared", ", ".join(field_text(fit, name) for name in named if name))


def doubt_note(doubt: str) -> Note:
    """Why a finding is less severe, where the configuration leaves a doubt."""
    return ("because", doubt)


def model_name(fit: Fit) -> str:
    """Name of the model: its class, or else its type."""
    return fit.expected.model_class or fit.expected.model_type
