"""The tensors that a configuration implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class NoTable(Exception):  # noqa: N818  an answer, not an error
    """Raised where nothing is known of a configuration's model, with the reason as one sentence."""


class BadValue(NoTable):
    """Raised where a field holds what no model has in it: a text or a negative number for a size."""


class UnknownModel(NoTable):
    """Raised where no table has the model's type or class, which its library may know."""


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor of the model.

    Attributes:
        needed: whether a load misses it; False for what may be stored or not: a tied head, buffers.
        dims: how each axis follows from the configuration (`num_key_value_heads * head_dim`), one text per axis.
        because: the fields that decide whether it exists (`tie_word_embeddings`), in the order of their weight.
        counted: the fields that say how many there are of its kind (`num_hidden_layers`).
    """

    shape: tuple[int, ...]
    needed: bool = True
    dims: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """All tensors of the model that a configuration declares, under one of the namings that its writers use.

    Attributes:
        source: the file that declares it (`config.json`, `args`).
        model_type: what the table is filed under (`llama`, `megatron gpt`).
        form: which naming this is (`saved`, `in memory`); words of a report.
        tensors: key -> what must be stored there.
        fields: the values that the configuration gives, or that its library takes by default, by name of the field.
        dtype: of the parameters, torch's name; None where it is not declared.
        made_with: libraries and versions that the table was made with (`transformers 5.23.0`).
        model_class: the class that it was made from (`LlamaForCausalLM`); "" where there is none.
        ignored: patterns of keys that the loader passes over without a word, as its class names them.
        remote_code: whether the configuration names code of its own, which may be another model of the same name.
        prefixes: what its loader takes off the names or puts before them (`base_model_prefix`).
        float32: words in the names of tensors that the library loads in float32 whatever is asked for (`gate.weight`).
    """

    source: str
    model_type: str
    form: str
    tensors: Mapping[str, ExpectedTensor]
    fields: Mapping[str, object]
    dtype: str | None = None
    made_with: str = ""
    model_class: str = ""
    ignored: tuple[str, ...] = ()
    remote_code: bool = False
    prefixes: frozenset[str] = frozenset()
    float32: tuple[str, ...] = ()
