"""Compares a checkpoint with the model that its own configuration describes, and sorts the differences by kind."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from ckptlint.analysis.fit.pairing import Pairing, best_pairing
from ckptlint.analysis.fit.trusted_config import Contradiction, contradictions
from ckptlint.analysis.quantised import quantisation
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Declared, Tensor
from ckptlint.model.cover import Shape
from ckptlint.model.facts import fact
from ckptlint.model.text import first_names
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import NotApplicable
from ckptlint.vocabulary.config_fields import ADAPTER_CONFIG, MISTRAL_CONFIG, QUANTISATION
from ckptlint.vocabulary.dtypes import FLOATS, ITEM_BITS
from ckptlint.vocabulary.keys import COMPUTED, COPIES, is_adapter, parse, role
from ckptlint.vocabulary.schemes import quantised_weight

if TYPE_CHECKING:
    from ckptlint.architecture.expected import Expected, ExpectedTensor

_LABELS = frozenset({"id2label"})  # set for classifiers only, so its absence leaves nothing open
_FIELD = lazy_pattern(r"[A-Za-z_][\w.]*")
_WIDE = 8
_MOST_AXES = 8
_FEW, _MORE = 20_000, 50  # most tensors that a configuration may imply: in all, and per stored one
_LAYERS = lazy_pattern(r"(?P<home>.*?)\.?(?:layers|h|blocks?|layer)\.(?P<number>\d{1,18})\..+")
_PART_CLASS = lazy_pattern(r"Text|CausalLM|^(?>.*?(?:Vision|Audio))\w*(?:Model|Encoder|Tower)$")
_PART_WORDS = frozenset({"text", "language", "llm", "lm", "only", "encoder", "decoder", "backbone", "tower", "vit"})
_MTP = {"num_nextn_predict_layers": 1, "num_mtp_layers": 1, "mtp_num_layers": 0, "mtp_num_hidden_layers": 0}
"""Fields that declare layers for multi-token prediction, and how many a class of transformers declares by itself.

Source: transformers 5.23 configuration_deepseek_v3, _deepseek_v4, _glm4_moe, _bailing_hybrid: 1, and no such layer is
built
"""
_MTP_JOINTS = (
    ("eh_proj.weight", "enorm.weight", "hnorm.weight"),
    ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
)
"""Modules that combine the embedding with the hidden states before such layers; a model has all of a group or none.

Source: vllm 0.11 model_executor.models.deepseek_mtp, glm4_moe_mtp; qwen3_next_mtp
"""


class ShapeDifference(NamedTuple):
    """A tensor whose shape is not the one that the configuration implies.

    Attributes:
        name: the expected key.
        axes: the axes whose sizes differ; empty where the number of axes differs.
    """

    name: str
    tensor: Tensor
    expected: ExpectedTensor
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The differences between a checkpoint and its configuration.

    Attributes:
        missing: expected keys that a load needs and the checkpoint lacks, in the model's order.
        absent_towers: modules of a multimodal model (`model.vision_tower`) that have no stored key.
        lost_towers: the absent towers that a section of the configuration describes, unless the export is partial.
        mtp_lost: keys that a stored layer for multi-token prediction lacks, though the model's layers have them.
        mtp_layers: numbers of stored and of declared layers for multi-token prediction; -1 where no field declares any.
        mtp_by_class: whether the declared number is only the default of a transformers class, which builds none.
        beyond: stored keys of surplus layers and experts, and of biases that the model does not have.
        foreign: other stored keys outside the model: a trainer's head, a custom module.
        instead: unknown stored keys in a module that lacks expected keys.
        mtp_shapes: tensors of multi-token prediction layers whose shape no layer of the model has.
        grown: rows of embedding and head where they exceed the declared vocabulary; 0 otherwise.
        doubt: why the configuration may describe another model than the table does; "" without doubt.
        open: fields that a hand-written configuration omits, so that ckptlint assumed their defaults.
        is_export: whether a library loads the files directly, by these names.
    """

    pairing: Pairing
    missing: list[str] = field(default_factory=list)
    absent_towers: tuple[str, ...] = ()
    lost_towers: tuple[str, ...] = ()
    mtp_lost: list[str] = field(default_factory=list)
    mtp_layers: tuple[int, int] = (0, 0)
    mtp_by_class: bool = False
    beyond: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)
    shapes: list[ShapeDifference] = field(default_factory=list)
    mtp_shapes: list[ShapeDifference] = field(default_factory=list)
    grown: int = 0
    doubt: str = ""
    open: tuple[str, ...] = ()
    is_export: bool = True
    is_quantised: bool = False

    @property
    def expected(self) -> Expected:
        """The naming that the pairing chose."""
        return self.pairing.expected

    def shown(self, name: str) -> str:
        """An expected key as this checkpoint would spell it."""
        if self.pairing.base:
            return name.removeprefix(f"{self.pairing.base}.")
        return name if self.is_export else self.pairing.prefix + name

    def doubt_of(self, fields: Iterable[str]) -> str:
        """Why a conclusion from these fields alone is uncertain; "" where it is certain."""
        # a hand-written configuration does not say which class a training job builds
        open_ = [name for name in self.open if not self.is_export or name in {*fields}]
        assumed = f"{self.expected.source} does not set {first_names(open_, 3)}: ckptlint assumed defaults"
        return self.doubt or (assumed if open_ else "")

    def doubt_that_exists(self, name: str) -> str:
        """Why the model may lack an expected tensor; "" where it must have it."""
        tensor = self.expected.tensors[name]
        return self.doubt_of((*tensor.because, *tensor.counted))

    def doubt_of_shape(self, name: str, axes: Iterable[int]) -> str:
        """Why these axes of an expected tensor may have another size; "" where their sizes are certain."""
        tensor = self.expected.tensors[name]
        dims = " ".join(dim for axis in axes for dim in tensor.dims[axis : axis + 1])
        return self.doubt_of((*tensor.because, *_FIELD.findall(dims)))

    @property
    def place(self) -> str:
        """Label of the configuration that the tensors are compared with."""
        made = f", {self.expected.made_with}" if self.expected.made_with else ""
        return f"{self.expected.source} (model_type {self.expected.model_type}{made})"


def fit_of(ckpt: Checkpoint) -> Fit:
    """The differences between a checkpoint and its configuration; NotApplicable where `config_fit` says why not."""
    fit = config_fit(ckpt)
    if isinstance(fit, str):
        raise NotApplicable(fit)
    return fit


def has_known_config(ckpt: Checkpoint) -> bool:
    """Whether a configuration decides names and shapes, so that no other inference is needed."""
    fit = config_fit(ckpt)
    return not isinstance(fit, str) and not fit.doubt_of(fit.open)


@fact
def judged_shapes(ckpt: Checkpoint) -> Collection[str]:
    """The stored keys whose shape follows from the configuration."""
    fit = config_fit(ckpt)
    stored = {} if isinstance(fit, str) else fit.pairing.stored
    axes = range(_MOST_AXES)
    return frozenset(key for name, key in stored.items() if not fit.doubt_of_shape(name, axes))  # type: ignore[union-attr]


@fact
def shapes_reported(ckpt: Checkpoint) -> Mapping[str, Shape]:
    """Stored key -> the shape it should have, for the keys that CFG003 reports."""
    fit = config_fit(ckpt)
    return {} if isinstance(fit, str) else {item.tensor.fqn: item.expected.shape for item in fit.shapes}


class BadConfig(str):
    """Why nothing is known of a model: a field of its configuration holds what no model has in it."""


@fact
def expectations(ckpt: Checkpoint) -> tuple[Expected, ...] | str:
    """The models that the configuration implies, one for each naming scheme; or why there is none, as text."""
    if ckpt.config is None:
        return "no configuration of a model lies beside these tensors"
    from ckptlint.architecture import huggingface, megatron, mistral
    from ckptlint.architecture.expected import BadValue, NoTable

    values, source = ckpt.config.values, ckpt.config.file
    try:
        most = max(_FEW, _MORE * len(ckpt.tensors))  # more is another model's
        if ckpt.format == "megatron-legacy":
            return megatron.rank_models(values, source, most)
        if ckpt.is_torch_dist:
            return megatron.megatron_models(values, source, megatron.layer_naming(ckpt.tensors), most)
        if source == MISTRAL_CONFIG:
            return mistral.mistral_models(values, source)
        if source == ADAPTER_CONFIG:
            return "the configuration here is the adapter's, which CFG006 and CFG007 judge"
        return huggingface.expected_models(values, source, most)
    except BadValue as reason:
        return BadConfig(reason)
    except NoTable as reason:
        return str(reason)


@fact
def config_fit(ckpt: Checkpoint) -> Fit | str:
    """The differences between a checkpoint and its configuration, or why they are unknown, as text."""
    fit = _first_fit(ckpt)
    # One wrong size is a damaged tensor or argument. Two mean that the arguments came with another model: converters
    # keep the arguments of the job that they read (COM008: "layers and hidden size of another model").
    if not isinstance(fit, str) and len(foreign_sizes(ckpt)) >= 2:
        return f"{fit.expected.source} belongs to another model (COM008)"
    return fit


@fact
def _first_fit(ckpt: Checkpoint) -> Fit | str:
    """The fit for the naming that the keys match best, before sizes are cross-checked (`foreign_sizes`)."""
    forms = expectations(ckpt)
    if isinstance(forms, str):
        return forms
    if ckpt.has_megatron_names and ckpt.partial_because:
        return "the metadata describes a part of a save"
    if len(contradictions(ckpt)) >= 2:
        return f"{forms[0].source} belongs to another model (COM008)"
    names = [name for name in ckpt.tensors if ckpt.is_export or parse(name).kind == "model"]
    codes = {weight.weight: weight.codes.fqn for weight in quantisation(ckpt).weights}
    weight_of = {key: weight for weight, key in codes.items()}
    pairing = best_pairing(forms, [weight_of.get(name, name) for name in names])
    stored = {name: codes.get(key, key) for name, key in pairing.stored.items()}
    pairing = replace(pairing, stored=stored, unknown=[codes.get(name, name) for name in pairing.unknown])
    if not (_shares_most_roles(pairing) if ckpt.has_megatron_names else pairing.fits):
        return f"the keys here are not those of model_type {forms[0].model_type} in {forms[0].source}"
    return _Judge(ckpt, pairing).fit()


def _shares_most_roles(pairing: Pairing) -> bool:
    """Whether three quarters of the roles on each side also occur on the other.

    Megatron arguments do not name the layer specification of a job, so the table may describe another model. Files of
    transformers name their class, and half the roles suffice there (`Pairing.fits`).
    """
    paired = {role(name) for name in pairing.stored}
    wanted = {role(name) for name in pairing.expected.tensors}
    unknown = {role(name) for name in pairing.unknown if not _may_lie_beside(name)}
    return bool(paired) and 4 * len(paired) >= 3 * max(len(wanted), len(paired | unknown))


@fact
def foreign_sizes(ckpt: Checkpoint) -> tuple[Contradiction, ...]:
    """The sizes in Megatron arguments that all tensors contradict with one common value.

    Two of them mean that the arguments belong to another model. Sizes that are all divided by the same number count as
    one, since a single lost tensor-parallel axis explains them.
    """
    fit = _first_fit(ckpt)
    if isinstance(fit, str) or not ckpt.has_megatron_names or not fit.shapes:
        return ()
    sizes_of_dim: dict[str, set[int]] = defaultdict(set)
    declared: dict[str, int] = {}
    shown: dict[str, str] = {}
    for name, stored in fit.pairing.stored.items():
        shape, expected = ckpt.tensors[stored].global_shape, fit.expected.tensors[name]
        for dim, size, wanted in zip(expected.dims, shape, expected.shape, strict=False):
            sizes_of_dim[dim].add(size)
            declared[dim], shown[dim] = wanted, stored
    contradicted: dict[str, Contradiction] = {}
    for dim, sizes in sizes_of_dim.items():
        if len(sizes) == 1 and (size := sizes.pop()) != declared[dim]:
            ratio = Fraction(size, declared[dim] or 1)
            # Tensor parallelism divides heads and inner sizes, never the hidden size or the number of layers.
            is_part = ratio.numerator == 1 and dim not in ("hidden_size", "num_layers")
            item = Contradiction(dim, Declared(declared[dim], fit.expected.source), size, shown[dim])
            contradicted.setdefault(f"1/{ratio.denominator}" if is_part else dim, item)
    return tuple(contradicted.values())


# ---------------------------------------------------------------- the judgement


class _Judge:
    """Sorts the differences of one pairing."""

    def __init__(self, ckpt: Checkpoint, pairing: Pairing) -> None:
        self.ckpt, self.pairing = ckpt, pairing
        self.tensors = pairing.expected.tensors
        self.config: Mapping[str, object] = ckpt.config.values if ckpt.config is not None else {}
        self.plain = {name for name in pairing.unknown if not _may_lie_beside(name) and not quantised_weight(name)}
        self.quantised = {stem for name in pairing.unknown if (stem := quantised_weight(name))}
        self.is_quantised = any(name in self.config for name in QUANTISATION) or bool(self.quantised)
        ignored = [re.compile(pattern) for pattern in pairing.expected.ignored]
        # stored weights outside the model, by their unquantised names
        self.beyond_model = self.plain | {f"{name.removesuffix('.weight')}.weight" for name in self.quantised}
        sections = (self.config, *(section for section in self.config.values() if isinstance(section, Mapping)))
        counts = ((name, section.get(name)) for section in sections for name in _MTP)
        self.mtp_fields = [(name, count) for name, count in counts if isinstance(count, int)]
        self.declared_mtp = max((count for _, count in self.mtp_fields), default=-1)
        unknown = (name for name in pairing.unknown if name in self.plain and not self._is_value_head(name))
        self.unknown = [name for name in unknown if not any(pattern.search(name) for pattern in ignored)]
        self.renamed_modules = {name.rpartition(".")[0] for name in self.unknown} if self.is_quantised else set()

    def fit(self) -> Fit:
        if not self.ckpt.is_export:  # the loader of a training checkpoint asks for the common prefix
            self.unknown += [self.pairing.stored.pop(name) for name in self.pairing.odd]
        base = self.pairing.base and f"{self.pairing.base}."  # a load does not need the head of a base model
        needed = (name for name, tensor in self.tensors.items() if tensor.needed and name not in self.pairing.stored)
        missing = self._without_joined(
            [
                name
                for name in needed
                if name.startswith(base)
                and not self._is_quantised(name)
                and name.rpartition(".")[0] not in self.renamed_modules
            ]
        )
        towers = self._absent_towers(missing)
        missing = [name for name in missing if _tower(name, towers) is None]
        beyond, instead, foreign = self._sorted_unknown(missing)
        shapes = self._shapes()
        grown = _grown_vocabulary(shapes)
        if grown:
            shapes = [item for item in shapes if not _is_vocabulary(item)]
        custom = f"{self.pairing.expected.source} names custom code (auto_map)"
        return Fit(
            self.pairing,
            missing,
            towers,
            tuple(tower for tower in towers if self._is_lost(tower)),
            *self._predicting(),
            all(count <= _MTP[name] for name, count in self.mtp_fields),
            beyond,
            foreign,
            instead,
            shapes,
            self._mtp_shapes(),
            grown,
            f"{custom}, whose model may differ from the library's" if self.pairing.expected.remote_code else "",
            self._open(),
            self.ckpt.is_export,
            self.is_quantised,
        )

    def _without_joined(self, missing: list[str]) -> list[str]:
        """The missing keys, without those whose rows a fused quantised weight holds under its in-memory name.

        Source: transformers 5.23 quantizer_torchao: the parts of a weight get no names of the saved form: `gate_proj`
        and `up_proj` stay `gate_up_proj._weight_qdata`
        """
        # No file says which parts were fused. Equal sums of rows in one module are taken as proof: torchao 0.18 keeps
        # the names that weights have in memory (quantised_exports/torchao_router). A real loss would leave another sum.
        spare: Counter[str] = Counter()
        for weight in quantisation(self.ckpt).weights:
            if weight.parts and weight.weight in self.quantised and weight.weight not in self.tensors:
                spare[_home(weight.weight)] += weight.codes.global_shape[0]
        wanted: Counter[str] = Counter()
        homes = {name: _home(name.removeprefix(f"{self.pairing.base}.")) for name in missing}
        for name, home in homes.items():
            wanted[home] += sum(self.tensors[name].shape[:1])
        return [name for name in missing if not spare[homes[name]] or spare[homes[name]] != wanted[homes[name]]]

    def _absent_towers(self, missing: list[str]) -> tuple[str, ...]:
        """Modules with their own layers that have no stored key, while other such modules have some."""
        homes = {place.home for name in self.tensors if (place := _place(name))}
        if len(homes) < 2:
            return ()
        towers = {_tower(name, homes) for name in self.pairing.stored}
        lost = {_tower(name, homes) for name in missing} - towers
        moved = {frozenset(tails) for block in _by_layer(self.unknown).values() for tails in block.values()}
        for block, layers in _by_layer(missing).items():
            # An unknown block of layers with exactly the same keys is the tower under another name.
            if any(frozenset(tails) in moved for tails in layers.values()):
                lost.discard(_tower(f"{block}.", homes))
        roots = {self._root(home) if self._is_lost(home) else home for home in lost if home is not None}
        return tuple(sorted(roots)) if towers - {None} else ()

    def _is_lost(self, tower: str) -> bool:
        """Whether the configuration describes an absent tower in a section, and nothing suggests a partial export."""
        # Exports of the language model alone keep the multimodal config.json. Only the class or the name of the folder
        # shows that intent (CFG001: "the same in a folder that is called text-only"), so either one withholds the
        # warning.
        inside = (name for name in self.tensors if name.startswith(f"{tower}.") and _place(name))
        sections = {field.partition(".")[0] for name in inside for field in self.tensors[name].counted if "." in field}
        classes = self.config.get("architectures")
        named = map(str, classes if isinstance(classes, list) else ())
        return (
            self.ckpt.is_export
            and not self.pairing.expected.remote_code
            and any(isinstance(self.config.get(section), dict) for section in sections)
            and not any(map(_PART_CLASS.search, named))
            and not _PART_WORDS & {*re.split(r"[\W_]+", PurePath(self.ckpt.path).name.lower())}
        )

    def _root(self, home: str) -> str:
        """The shortest prefix of this path below which no key is stored."""
        words = home.split(".")
        roots = (".".join(words[:end]) for end in range(1, len(words)))
        return next((r for r in roots if not any(n.startswith(f"{r}.") for n in self.pairing.stored)), home)

    def _mtp_layers(self) -> Iterator[tuple[str, set[str], list[tuple[str, set[str]]]]]:
        """Each stored layer for multi-token prediction, and the model's by similarity to it: (prefix, key suffixes)."""
        # by its name (`mtp`), its joining modules, or a number past the last layer where the configuration declares any
        main = _by_layer(name for name, tensor in self.tensors.items() if tensor.needed)
        joints = {joint for group in _MTP_JOINTS for joint in group}
        for block, layers in _by_layer(self.beyond_model).items():
            homes = [block] if block in main else [*main]
            for number, tensors in sorted(layers.items()):
                is_declared = block in main and self.declared_mtp > 0
                if not main or number in main.get(block, ()) or not ("mtp" in block or tensors & joints or is_declared):
                    continue
                others = [(f"{home}.{n}.", main[home][n]) for home in homes for n in sorted(main[home], reverse=True)]
                yield f"{block}.{number}.", tensors, sorted(others, key=lambda candidate: len(candidate[1] ^ tensors))

    def _predicting(self) -> tuple[list[str], tuple[int, int]]:
        """Keys that prediction layers lack beside the most similar layer; numbers of stored and declared ones."""
        every, lost, count = self.beyond_model, [], 0
        for start, tensors, ((_, tails), *_) in self._mtp_layers():
            count += any(name.startswith(f"{start.rstrip('.').rpartition('.')[0]}.") for name in self.tensors)
            # A prediction layer may use another MLP or attention than the model. A module with any key of its own is
            # taken to be built that way, so only keys of modules that match otherwise count as lost.
            built_otherwise = {tail.partition(".")[0] for tail in tensors - tails}
            gone = sorted(tail for tail in tails - tensors if tail.partition(".")[0] not in built_otherwise)
            lost += [f"{start}{tail}" for tail in gone if tensors & tails]
        joints = {
            name.removesuffix(ending) + joint
            for group in _MTP_JOINTS
            for ending in group
            for name in every
            if f".{name}".endswith(f".{ending}")
            for joint in group
        }
        # A joint counts as present if any key starts with its stem: LongCat writes `enorm.m.weight`.
        lost += sorted(joint for joint in joints - every if not any(n.startswith(joint[:-6]) for n in every))
        if not count and any("mtp" in name or "nextn" in name for name in every):
            return lost, (0, 0)  # such layers exist under unknown names, so their number is unknown
        return lost, (count, self.declared_mtp if count or self.ckpt.is_export else 0)

    def _sorted_unknown(self, missing: list[str]) -> tuple[list[str], list[str], list[str]]:
        """The unknown keys as (beyond, instead, foreign): see `Fit`."""
        if not self.unknown:
            return [], [], []
        numbers: dict[str, set[int]] = defaultdict(set)
        for place in filter(None, map(_place, self.tensors)):
            numbers[place.home].add(place.number)
        weights = {name.rpartition(".")[0] for name in self.tensors}
        gaps = {_module(name) for name in missing}
        tails = {name.partition(".")[2] for name in missing} | set(missing)
        roles = {role(name) for name in self.tensors}
        mtp = {start for start, _, _ in self._mtp_layers()}
        beyond, instead, foreign = [], [], []
        for name in self.unknown:
            position = _place(name)
            is_new_layer = position and position.home in numbers and position.number not in numbers[position.home]
            # A key equal to a missing one without its first part was saved below another module: renamed, not added.
            if name in tails:
                instead.append(name)
            elif position and is_new_layer and f"{position.block}.{position.number}." in mtp:
                continue
            elif is_new_layer or role(name) in roles:
                beyond.append(name)
            elif _module(name) in gaps:
                instead.append(name)
            elif name.endswith(".bias") and name.rpartition(".")[0] in weights:
                beyond.append(name)
            else:
                foreign.append(name)
        return beyond, instead, foreign

    def _mtp_shapes(self) -> list[ShapeDifference]:
        """Weights of prediction layers whose shape occurs in no layer of the model."""
        differences: list[ShapeDifference] = []
        for start, tensors, others in self._mtp_layers():
            nearest, odd, fitting = others[0][0], dict[str, ShapeDifference](), set()
            for tail in sorted(tensors & others[0][1]):
                tensor, expected = self.ckpt.tensors.get(start + tail), self.tensors[nearest + tail]
                if tensor is None or not _is_wide_float(tensor.dtype) or tensor.is_flattened:
                    continue
                if all(tensor.global_shape != self.tensors[at + tail].shape for at, tails in others if tail in tails):
                    odd[tail] = ShapeDifference(nearest + tail, tensor, expected, ())
                elif len(tensor.global_shape) > 1:
                    fitting.add(tail.partition(".")[0])
            modules = {tail.partition(".")[0] for tail in odd}
            # One odd module may have its own width by design. Two of them, or one of whose matrices others fit, may
            # not.
            if len(modules) > 1 or modules & fitting:
                differences += odd.values()
        return [*differences, *self._joint_shapes()]

    def _joint_shapes(self) -> Iterator[ShapeDifference]:
        """Projections that join two normed inputs and are not as wide as both, or not as tall as one."""
        for projection, *norms in _MTP_JOINTS:
            for key, tensor in self.ckpt.tensors.items():
                stem = key.removesuffix(projection)
                sides = [
                    norm_tensor.global_shape for norm in norms if (norm_tensor := self.ckpt.tensors.get(stem + norm))
                ]
                shape = (*sides[0], 2 * sides[0][0]) if len(sides) == 2 and set(map(len, sides)) == {1} else ()
                is_plain = _is_wide_float(tensor.dtype) and len(tensor.global_shape) == 2 and not tensor.is_flattened
                if stem != key and is_plain and shape and sides[0] == sides[1] and tensor.global_shape != shape:
                    like = next(iter(self.tensors.values()))
                    yield ShapeDifference("one that joins its norms", tensor, replace(like, shape=shape), ())

    def _shapes(self) -> list[ShapeDifference]:
        differences = []
        for name, stored in self.pairing.stored.items():
            tensor, expected = self.ckpt.tensors[stored], self.tensors[name]
            if tensor.global_shape == expected.shape or tensor.is_flattened or self._is_value_head(name):
                continue
            if self.is_quantised and (self._is_quantised(name) or not _is_wide_float(tensor.dtype)):
                continue
            same = len(tensor.global_shape) == len(expected.shape)
            axes = [i for i, (a, b) in enumerate(zip(tensor.global_shape, expected.shape, strict=False)) if a != b]
            differences.append(ShapeDifference(name, tensor, expected, tuple(axes) if same else ()))
        return differences

    def _is_value_head(self, name: str) -> bool:
        """Whether a key belongs to an output layer with one row: critics and reward models replace the head with it."""
        head = self.ckpt.tensors.get("output_layer.weight") if self.ckpt.has_megatron_names else None
        return name.startswith("output_layer.") and head is not None and head.global_shape[:1] == (1,)

    def _is_quantised(self, name: str) -> bool:
        return bool({name, name.rpartition(".")[0]} & self.quantised)

    def _open(self) -> tuple[str, ...]:
        """The fields that a hand-written configuration does not set."""
        # transformers writes its version, and every field that differs from its default
        if "transformers_version" in self.config or self.ckpt.config is None or self.ckpt.has_megatron_names:
            return ()
        sections = [value for value in self.config.values() if isinstance(value, dict)]
        given = set(self.config).union(*sections)
        named = (name for name in self.pairing.expected.fields if name not in _LABELS)
        return tuple(name for name in named if name.rpartition(".")[2] not in given)


def _may_lie_beside(name: str) -> bool:
    """Whether an unknown key is no parameter of the model: a buffer, a second copy, an adapter."""
    words = name.split(".")
    if COMPUTED & {words[-1], ".".join(words[-2:])} or "rotary_emb" in words:
        return True
    if name.endswith((".attn.bias", ".attention.bias")) and words[-3:-2] and words[-3].isdecimal():
        return True  # the causal mask of GPT-2 and GPT-NeoX
    key = parse(name)
    return key.kind != "model" or bool(COPIES & set(key.scope)) or is_adapter(key)


def _is_wide_float(dtype: str) -> bool:
    return dtype in FLOATS and ITEM_BITS[dtype] > _WIDE


def _tower(name: str, homes: Iterable[str]) -> str | None:
    """The module with layers that holds a key: the longest matching prefix."""
    prefixes = [home for home in homes if home and name.startswith(f"{home}.")]
    return max(prefixes, key=len, default=None)


class _Place(NamedTuple):
    """The position of a key in a layer: path before the word for layers, path with that word, number of the layer."""

    home: str
    block: str
    number: int


@lru_cache(maxsize=1 << 15)
def _place(name: str) -> _Place | None:
    match = _LAYERS.fullmatch(name)
    return match and _Place(match["home"], name[: match.start("number") - 1], int(match["number"]))


def _by_layer(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Block of layers -> number of a layer -> key suffixes after that number."""
    tails_by_layer: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if place := _place(name):
            tails_by_layer[place.block][place.number].add(name.removeprefix(f"{place.block}.{place.number}."))
    return tails_by_layer


def numbered_layer(name: str) -> tuple[str, int] | None:
    """The block and number of the layer that holds a key; None outside layers.

    >>> numbered_layer("model.layers.3.mlp.up_proj.weight"), numbered_layer("lm_head.weight")
    (('model.layers', 3), None)
    """
    return (place := _place(name)) and (place.block, place.number)


def _module(name: str) -> str:
    """The module of a layer that a key is in, two levels below the layer's number; its parent outside of layers."""
    place = _place(name)
    if place is None:
        return name.rpartition(".")[0]
    start = f"{place.block}.{place.number}."
    return start + name[len(start) :].partition(".")[0]


def _home(name: str) -> str:
    """Path of the module that contains the module of a weight."""
    return ".".join(name.split(".")[:-2])


def _is_vocabulary(item: ShapeDifference) -> bool:
    """Whether rows of the vocabulary are all that differs, where they are not declared with their padding."""
    dim = (item.expected.dims or ("",) * 9)[item.axes[0]] if len(item.axes) == 1 else ""
    return "vocab_size" in dim and dim != "padded_vocab_size"


def _grown_vocabulary(shapes: list[ShapeDifference]) -> int:
    """The rows of embedding and head, where both have as many and more than declared: tokens were added, or padding."""
    tables = [item for item in shapes if _is_vocabulary(item)]
    sizes = {item.tensor.global_shape[item.axes[0]] for item in tables}
    if len(sizes) != 1 or any(size <= item.expected.shape[item.axes[0]] for item in tables for size in sizes):
        return 0
    return sizes.pop()


# ---------------------------------------------------------------- dtypes and bytes


class OtherDtype(NamedTuple):
    """The tensors that are stored in another float dtype than the configuration declares.

    Attributes:
        names: stored keys.
        declared: bytes that they would take as declared.
        extra: bytes that they take more than that; negative where they are narrower.
    """

    dtype: str
    names: tuple[str, ...]
    declared: int
    extra: int


def other_dtypes(ckpt: Checkpoint, fit: Fit) -> list[OtherDtype]:
    """Per float dtype other than the declared one, the tensors that have it; [] where dtypes say nothing."""
    declared = fit.expected.dtype
    if declared not in FLOATS or fit.is_quantised or not fit.is_export:
        return []
    stored = [ckpt.tensors[name] for name in fit.pairing.stored.values()]
    others = grouped((t.dtype, t) for t in stored if t.dtype != declared and _is_wide_float(t.dtype))
    bits, dtypes = ITEM_BITS[declared], []
    for dtype, tensors in others.items():
        names, count = tuple(tensor.fqn for tensor in tensors), sum(tensor.volume for tensor in tensors)
        dtypes.append(OtherDtype(dtype, names, count * bits // 8, count * (ITEM_BITS[dtype] - bits) // 8))
    return dtypes


def kept_in_float32(ckpt: Checkpoint) -> frozenset[str]:
    """The stored keys that the model's class keeps in float32; none where no table knows the class.

    Source: transformers.PreTrainedModel._keep_in_fp32_modules_strict (5.24)
    """
    fit = config_fit(ckpt)
    if isinstance(fit, str) or not fit.expected.float32:
        return frozenset()
    kept = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, fit.expected.float32))})(?:\.|$)")
    return frozenset(stored for name, stored in fit.pairing.stored.items() if kept.search(name))


def explains_bytes(ckpt: Checkpoint, size: int) -> bool:
    """Whether a size in bytes fits the declared model, and other findings already explain the difference."""
    fit = config_fit(ckpt)
    if isinstance(fit, str) or not (fit.missing or fit.shapes or other_dtypes(ckpt, fit)):
        return False
    return implied_bytes(fit) <= size <= implied_bytes(fit, fit.expected.tensors)


def implied_bytes(fit: Fit, names: Iterable[str] | None = None) -> int:
    """Bytes of the named expected tensors, or of all needed ones, in the declared dtype or in 16 bits without one."""
    bits = ITEM_BITS.get(fit.expected.dtype or "", 16)
    chosen = (n for n, t in fit.expected.tensors.items() if t.needed) if names is None else names
    return sum(prod(fit.expected.tensors[name].shape) for name in chosen) * bits // 8
