from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from math import prod

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.architecture.adapters import (
    EXPERTS_TURNED,
    Factors,
    Part,
    expert_sizes,
    factors_of,
    home_of_experts,
    namings_of,
    read_adapter_config,
)
from ckptlint.model import Checkpoint, PayloadTable, Tensor
from ckptlint.model.text import first_names, fold_names, join_words, numbered, plural, printable, shape_text, verb
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.dtypes import ENCODINGS
from ckptlint.vocabulary.keys import parse

_FEW = 5  # a gap is at most one layer in five
_LEAST = 3


@rule("CFG006", "adapter-factors", Severity.ERROR, whole=True, yields_to=("CFG007",))
def adapter_factors(ckpt: Checkpoint) -> Iterator[Finding]:
    """The two factors of a low-rank adapter do not fit each other, or one is missing.

    What it checks:
        Every module has both factors (`lora_A` and `lora_B`, `lora_embedding_A` and `_B`, `lora_down` and `lora_up`).
        Neither is empty or flat, and the second has as many columns as the first has rows, divided by the groups of a
        convolution. No other tensor of an adapter's own file is empty. A magnitude vector of DoRA has one element per
        row of the second factor. It is a warning if a few consecutive layers lack the adapter of a module that the
        layers around them have, unless `adapter_config.json` chooses layers itself. It is also a warning if modules of
        one component (`unet`, `text_encoder`) are named in several ways: `lora_A` as in peft, `lora_down` as in kohya,
        `lora.down` as in early diffusers. No configuration is needed. If the base model's `config.json` is beside the
        adapter, or `--expect` names the base model, the factors are as wide and tall as the weight that they belong to;
        those of experts that are one tensor in memory lie as the version of peft in `adapter_config.json` lays them
        (turned in 0.19.1).

        At depth data, factors B of which a half, three quarters, seven eighths, ... of the elements are zero, the same
        share in all that hold zeros, and the whole first or last row, are an error: one rank's rows. Zeros in some
        columns alone are ranks that are not used. Factors B of zeros alone are info.
    Why it matters:
        peft refuses a factor of the wrong size. A factor that is not stored keeps its initial values: there the
        adapter does nothing, or adds noise.
    Usual causes:
        The adapter was saved while ZeRO-3 or FSDP held its parameters in parts, or a filter of keys missed some.
    How to fix:
        Gather the parameters before the save, and save again.
    See:
        peft.utils.save_and_load.set_peft_model_state_dict
    """
    tensors = {param.tensor.fqn: param.tensor for param in inventory_of(ckpt).params}
    modules = factors_of(tensors)
    if not any({"A", "B"} & factors.keys.keys() for factors in modules):
        raise NotApplicable("no low-rank adapters")
    keys = [key for factors in modules for key in factors.keys.values()]
    of_modules, is_own_file = set(keys), ckpt.metadata_file.startswith("adapter_model")
    other_keys = [key for key in tensors if is_own_file and key not in of_modules]
    empty = [key for key in (*keys, *other_keys) if 0 in tensors[key].global_shape]
    bad = set(empty)
    matrices = [key for factors in modules for name, key in factors.keys.items() if name != "magnitude"]
    flat = [key for key in matrices if len(tensors[key].global_shape) < 2 and key not in bad]
    if empty:
        yield _shapeless(tensors, empty, len(keys) + len(other_keys), "empty")
    if flat:
        yield _shapeless(tensors, flat, len(keys), "flat (fewer than two dims)")
    yield from _lone_factors(modules, tensors)
    namings = [*_two_namings(tensors)]
    yield from namings
    bad.update(flat)
    sound = [factors for factors in modules if not bad.intersection(factors.keys.values())]
    yield from _wrong_ranks(sound, tensors)
    yield from _wrong_magnitudes(sound, tensors)
    yield from _against_base(ckpt, sound, tensors)
    if not namings:  # what is named otherwise is no gap
        yield from _layer_gaps(ckpt, modules)
    if ckpt.payload is not None:
        yield from _zero_factors(ckpt.payload, [tensors[factors.keys["B"]] for factors in sound if "B" in factors.keys])


def _zero_factors(payload: PayloadTable, factors: list[Tensor]) -> Iterator[Finding]:
    """Findings on factors B that hold only zeros, or zeros in all rows but one rank's."""
    # If k ranks gather a factor and one alone has data, (k-1)/k of it is zero: the same share in each factor, and at
    # least the first or last row. Other shares, and zeros in columns, are ranks of the adapter that are not used.
    by_share: dict[Fraction, list[Tensor]] = defaultdict(list)
    for factor in factors:
        records = factor.chunks.record
        if (records < 0).any() or not payload.scanned[records].all():
            return
        by_share[Fraction(int(payload.zeros[records].sum()), factor.volume)].append(factor)
    with_zeros = by_share.keys() - {Fraction(0)}
    if len(with_zeros) != 1 or not factors:
        return
    (share,) = with_zeros
    keys = [factor.fqn for factor in by_share[share]]
    if share == 1 and len(keys) == len(factors):
        message = f"factor B of {plural(len(keys), 'module')} holds only zeros"
        why = "the product of the factors is 0: the adapter was not trained, or does nothing"
        yield Finding(message, at=Location(factors[0]), severity=Severity.INFO, identity=("untrained",), why=why)
        return
    # The first or the last row is zero, so that rows are absent and not columns.
    edges = [payload.edge_zeros[factor.chunks.record] >= prod(factor.global_shape[1:]) for factor in by_share[share]]
    is_of_ranks = share != 1 and share.denominator - share.numerator == 1
    if is_of_ranks and len(keys) >= _LEAST and all(edge.any() for edge in edges):
        yield Finding(
            f"{share} of factor B is exactly zero in {len(keys)} of {plural(len(factors), 'module')}",
            at=Location(by_share[share][0]),
            identity=(str(share), *keys),
            keys=tuple(keys),
            notes=_keys(keys),
            why=f"one of {share.denominator} ranks saved its rows: in the other rows the adapter does nothing",
            hint="gather the factors from all ranks of tensor parallelism before saving",
            group=f"zeros {share}",
        )


def _shapeless(tensors: dict[str, Tensor], keys: list[str], total: int, how: str) -> Finding:
    return Finding(
        f"{len(keys)} of {plural(total, 'adapter tensor')} {verb(len(keys), 'is')} {how}",
        at=Location(tensors[keys[0]]),
        identity=tuple(keys),
        keys=tuple(keys),
        kind="shapeless",
        notes=_keys(keys),
        why="loading stops with a size mismatch; this file does not hold the trained values",
        hint="gather the parameters before saving: with ZeRO-3 and FSDP each rank holds only a shard",
        group=how,
    )


def _lone_factors(modules: list[Factors], tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Findings on modules with one of the two factors, one for all modules that lack A and one for B."""
    both = sum({"A", "B"} <= factors.keys.keys() for factors in modules)
    pairs: tuple[tuple[Part, Part], ...] = (("A", "B"), ("B", "A"))
    for factor, partner in pairs:
        lone = [factors.keys for factors in modules if partner in factors.keys and factor not in factors.keys]
        if keys := [of_module[partner] for of_module in lone]:
            these = "this module does" if len(keys) == 1 else f"these {len(keys)} modules do"
            yield Finding(
                f"factor {factor} is not stored for {len(keys)} of {plural(both + len(keys), 'module')}",
                at=Location(tensors[keys[0]]),
                identity=(factor, *keys),
                keys=tuple(keys),
                notes=_keys(keys, "stored alone"),
                why="loading only warns and keeps the initial values: "
                + (f"zeros, so {these} nothing" if factor == "B" else "random numbers under a trained factor"),
                hint="save again with both, or take the adapter from an earlier step",
                group=f"alone {factor}",
            )


_NAMED = {"peft": "lora_A", "diffusers": "lora.down", "kohya": "lora_down"}


def _two_namings(tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """A finding on each component of which some modules are named by one library and others by another."""
    for component, by_naming in namings_of(tensors).items():
        most, *others = sorted(by_naming, key=lambda naming: -len(by_naming[naming]))
        # modules that are stored in both namings are there for whichever a loader reads
        if not any(by_naming[naming].keys() - by_naming[most].keys() for naming in others):
            continue
        shown = [f"{len(by_naming[name])} as {name} does ({_NAMED[name]})" for name in (most, *others)]
        keys = [key for naming in others for key in by_naming[naming].values()]
        yield Finding(
            f"modules of {printable(component)} are named in {len(shown)} ways: {join_words(shown)}",
            at=Location(tensors[keys[0]]),
            identity=(component, "namings"),
            keys=tuple(keys),
            severity=Severity.WARNING,
            kind="namings",
            why="a loader reads one naming and drops the other modules without an error",
            hint="rename the keys of the fewer modules as the others are, or save again",
            is_apart=True,
        )


def _wrong_ranks(modules: list[Factors], tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Findings on factors whose inner sizes differ: rows of A and columns of B are both the adapter's rank."""
    for factors in modules:
        if not {"A", "B"} <= factors.keys.keys():
            continue
        a, b = tensors[factors.keys["A"]], tensors[factors.keys["B"]]
        rows, columns = a.global_shape[0], b.global_shape[1]
        is_grouped = len(b.global_shape) > 2 and rows % columns == 0
        if rows != columns and not is_grouped:
            yield Finding(
                f"factor B{{of}} has {columns:,} columns, but factor A has {rows:,} rows",
                at=Location(b),
                notes=(("factor A", f"{a.fqn}: {shape_text(a.global_shape)}"),),
                why="the two are multiplied, so one of them has a different rank or belongs to another module",
                hint="take both from the same save",
                group=f"rank {rows} {columns} {parse(b.fqn).role}",
            )


def _against_base(ckpt: Checkpoint, modules: list[Factors], tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Findings on factors whose outer sizes are not those of the base model's weight."""
    shapes, source = _base_shapes(ckpt)
    experts = expert_sizes(shapes)
    of_experts: list[tuple[Tensor, Tensor, frozenset[tuple[int, int]]]] = []
    for factors in modules:
        if not {"A", "B"} <= factors.keys.keys():
            continue
        a, b = tensors[factors.keys["A"]], tensors[factors.keys["B"]]
        if len(a.global_shape) != 2 or len(b.global_shape) != 2:
            continue
        key, rows, columns = f"{factors.base_module}.weight", b.global_shape[0], a.global_shape[1]
        shape = shapes.get(key, ())
        if len(shape) == 2 and (rows, columns) not in (shape, shape[::-1]):
            is_b = rows not in shape
            name, side, at, size = ("B", "rows", b, rows) if is_b else ("A", "columns", a, columns)
            wanted = shape[0 if is_b else 1]
            yield Finding(
                f"factor {name}{{of}} has {size:,} {side}, but the weight in the base model has {wanted:,}",
                at=Location(at),
                notes=(("base model", f"{source}: {key} {shape_text(shape)}"),),
                why="peft stops with a size mismatch"
                + (f": this is one rank's part of {wanted // size}" if wanted % size == 0 else ""),
                hint="gather the factors from all ranks before saving, or name the base model of the training",
                group=f"base {size} {wanted} {parse(at.fqn).role}",
            )
        sizes = experts.get(home_of_experts(factors.base_module), frozenset())
        if not shape and sizes:
            of_experts.append((a, b, sizes))
    yield from _against_experts(ckpt, of_experts, source)


def _base_shapes(ckpt: Checkpoint) -> tuple[dict[str, tuple[int, ...]], str]:
    """(key -> shape of the base model's weight, file or reference that gives the shapes)."""
    base = ckpt.config.base if ckpt.config is not None else {}
    shapes: dict[str, tuple[int, ...]] = {}
    if base:
        from ckptlint.architecture.expected import NoTable
        from ckptlint.architecture.huggingface import expected_models

        with suppress(NoTable):
            forms = [form for form in expected_models(base) if not form.remote_code]
            shapes = {key: tensor.shape for form in forms for key, tensor in form.tensors.items()}
    if shapes or ckpt.reference is None:
        return shapes, "config.json"
    stored = ckpt.reference.tensors.items()  # packed weights have other shapes than those that they stand for
    return {key: shape for key, (dtype, shape) in stored if shape and dtype in ENCODINGS}, ckpt.reference.source


def _against_experts(
    ckpt: Checkpoint, pairs: list[tuple[Tensor, Tensor, frozenset[tuple[int, int]]]], source: str
) -> Iterator[Finding]:
    """Findings on factors for all experts of a layer that fit no weight, or fit only with A and B exchanged."""
    # peft changed the order of these factors. If all factors of a file fit when exchanged, an earlier peft wrote it. If
    # only some do, it is a coincidence: one rank's half of gate and up is as large as down, exchanged.
    wrong = [pair for pair in pairs if (pair[1].global_shape[0], pair[0].global_shape[1]) not in pair[2]]
    turned = [pair for pair in pairs if (pair[0].global_shape[1], pair[1].global_shape[0]) in pair[2]]
    version = read_adapter_config(ckpt.config.values).version if ckpt.config is not None else ()
    is_late, stated = version >= EXPERTS_TURNED, ".".join(map(str, version))
    for a, b, sizes in wrong:
        rows, columns = b.global_shape[0], a.global_shape[1]
        expected = join_words([f"{across:,} and {down:,}" for down, across in sorted(sizes)], "or")
        notes = [("base model", f"{source}: for its experts, {expected}")]
        if len(turned) < len(pairs):
            yield Finding(
                f"factor A has {columns:,} columns and factor B{{of}} {rows:,} rows, which fits no weight of the "
                "experts in the base model",
                at=Location(b),
                notes=tuple(notes),
                why="peft stops with a size mismatch",
                hint="gather the factors from all ranks before saving, or name the base model that it was trained on",
                group=f"experts {rows} {columns} {parse(b.fqn).role}",
            )
            continue
        notes += [("written by", f"peft {stated}, says adapter_config.json")] if stated else []
        yield Finding(
            f"factor A has {columns:,} columns and factor B{{of}} {rows:,} rows, the other way round than peft "
            f"{'.'.join(map(str, EXPERTS_TURNED))} and later make them for the experts of the base model",
            at=Location(b),
            severity=Severity.ERROR if is_late else Severity.INFO if version else Severity.WARNING,
            notes=tuple(notes),
            why="these versions stop with a size mismatch; earlier ones took the middle dim of [experts, out, in] for "
            "the input",
            hint=("save it again with the peft that trained it, " if is_late else "load it with an earlier peft, ")
            + "or exchange the two factors of each expert",
            group="experts turned",
        )


def _wrong_magnitudes(modules: list[Factors], tensors: dict[str, Tensor]) -> Iterator[Finding]:
    for factors in modules:
        if {"B", "magnitude"} <= factors.keys.keys():
            b, magnitude = tensors[factors.keys["B"]], tensors[factors.keys["magnitude"]]
            count, rows = prod(magnitude.global_shape), b.global_shape[0]
            if count != rows:
                yield Finding(
                    f"the magnitude{{of}} has {plural(count, 'element')}, but factor B has {plural(rows, 'row')}",
                    at=Location(magnitude),
                    notes=(("factor B", f"{b.fqn}: {shape_text(b.global_shape)}"),),
                    hint="take both from the same save",
                    group=f"magnitude {count} {rows}",
                )


def _layer_gaps(ckpt: Checkpoint, modules: list[Factors]) -> Iterator[Finding]:
    """Findings on a few consecutive layers that lack a module's adapter (SHP001: all), unlike its siblings there."""
    if ckpt.config is not None and read_adapter_config(ckpt.config.values).is_explicit:
        return
    layers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for factors in modules:
        lead = next(iter(factors.keys.values()))
        key = parse(lead)
        if key.layer is not None and not key.in_experts:
            depth = len(key.path.split(".")) - len(lead.removeprefix(f"{factors.module}.").split("."))
            layers[factors.adapter, ".".join(key.role.split(".")[:depth])][key.layer] = lead
    siblings: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for (adapter, role), stored in layers.items():
        for layer in stored:
            siblings[adapter, role.rpartition(".")[0]][layer].add(role)
    for (adapter, role), stored in layers.items():
        roles_of = siblings[adapter, role.rpartition(".")[0]]
        lost = sorted(roles_of.keys() - stored.keys())
        usual = set().union(*(roles_of[layer] for layer in stored))
        # A layer with modules that the others lack is of another kind, and need not have this one.
        is_run = bool(lost) and lost[-1] - lost[0] == len(lost) - 1 and all(roles_of[layer] <= usual for layer in lost)
        if is_run and len(stored) >= _LEAST and _FEW * len(lost) <= len(stored) + len(lost):
            first, lead = next(iter(stored.items()))
            name = role.rpartition("*.")[2]
            yield Finding(
                f"{name} has no adapter in {numbered('layer', lost)}, but has one in {len(stored)} other layers",
                at=Location(lead.replace(f".{first}.", f".{lost[0]}.", 1)),
                identity=tuple(map(str, lost)),
                confidence="likely",
                notes=(("others", f"other modules of {role.rpartition('.')[0]} have one in these layers"),),
                why="loading only warns and keeps the initial values, so the adapter does nothing there",
                hint="take it from the previous step, or save again",
                inferred_from=f"the {len(stored)} other layers",
            )


def _keys(keys: list[str], label: str = "keys") -> tuple[Note, ...]:
    return ((label, first_names(fold_names(keys))),)
