"""CFG007: an adapter has the names and ranks that its `adapter_config.json` says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckptlint.architecture.adapters import PREFIX, AdapterConfig, endings, factors_of, read_adapter_config
from ckptlint.model import Checkpoint
from ckptlint.model.text import braces, plural, printable, ranges, some
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.config_fields import ADAPTER_CONFIG
from ckptlint.vocabulary.keys import WRAPPING, parse

_SHOWN = 6
_LONGEST = 60
_ALTERNATIVES = (frozenset({"classifier", "score"}), frozenset({"embed_tokens", "lm_head"}))
_NATIVE = frozenset({"linear_qkv", "linear_q", "linear_kv", "linear_proj", "linear_fc1", "linear_fc2"})
_PROVEN_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})),
    **dict.fromkeys(("up_proj", "down_proj"), frozenset({"gate_proj", "up_proj", "down_proj"})),
}
"""Module -> those that no model has without it."""
_ATTENTION = ("q", "k", "v", "qkv", "attn_out")


@rule("CFG007", "adapter-config", Severity.ERROR)
def adapter_config(ckpt: Checkpoint) -> Iterator[Finding]:
    """The keys or ranks of an adapter do not match its `adapter_config.json`.

    What it checks:
        For adapters of type LORA, the rank of every module is `r`, or what `rank_pattern` gives it; factors of fused
        experts are a multiple of it. Patterns that are more than plain text are never run: their ranks are allowed
        everywhere. `use_dora` comes with magnitude vectors. Every name in `target_modules` and `modules_to_save` is
        stored, unless `exclude_modules` takes it out: a missing one is a warning, or info for names that many lists
        carry and the base model need not have.

        Keys that peft does not find are an error if none has `base_model.model.`, or if some modules of a layer have
        the names of Megatron-Core and others those of transformers. They are a warning with the name of an adapter or
        a wrapper in them. If the base model's `config.json` is beside it, the layers with adapters of the attention are
        not one end of its layers alone, as of one pipeline stage. An adapter without a configuration is info. Other
        types are not judged.
    Why it matters:
        peft stops on a different rank. Whatever it does not find keeps its initial values, after a warning at most.
    Usual causes:
        The configuration belongs to another run, or somebody filtered or saved the state dict by hand.
    How to fix:
        Restore the configuration of the run, or save again with `save_pretrained`.
    See:
        peft.tuners.lora.LoraConfig, peft.utils.save_and_load.set_peft_model_state_dict
    """
    if not ckpt.is_safetensors or not ckpt.metadata_file.startswith("adapter_model"):
        raise NotApplicable("no adapter as peft saves them")
    if ckpt.config is None:
        if ckpt.tensors and not any(problem.file == ADAPTER_CONFIG for problem in ckpt.problems):
            yield _without_config(ckpt)
        return
    config = read_adapter_config(ckpt.config.values)
    if config.kind != "LORA" or not ckpt.tensors:
        raise NotApplicable(f"its type is {printable(config.kind[:_LONGEST]) or 'not given'}; only LORA is judged here")
    modules = {factors.module: factors for factors in factors_of(ckpt.tensors)}
    if not modules:
        yield _finding(
            f"{ADAPTER_CONFIG} says LORA, but none of {plural(len(ckpt.tensors), 'tensor')} is a factor of it",
            "factors",
        )
        return
    yield from _names(ckpt)
    yield from _ranks(ckpt, config)
    yield from _magnitudes(ckpt, config)
    native = _native(modules)
    if native:
        yield _of_native(native)
    else:
        yield from _targets(set(modules), config)
    yield from _saved(ckpt, config)
    if not config.is_explicit and not any(map(_has_number, config.targets)):
        yield from _layers(modules, ckpt.config.base_layers)


def _without_config(ckpt: Checkpoint) -> Finding:
    return Finding(
        f"{ckpt.metadata_file} is here without {ADAPTER_CONFIG}",
        at=Location(file=ckpt.metadata_file),
        identity=(ADAPTER_CONFIG,),
        severity=Severity.INFO,
        why="peft cannot load it, and the factor that scales it (lora_alpha / r) is stored nowhere else",
        hint="copy it from where the adapter was written",
    )


def _names(ckpt: Checkpoint) -> Iterator[Finding]:
    """Names under which peft does not look; reported once, since one save names all keys alike."""
    keys = list(ckpt.tensors)
    wrapped = [key for key in keys if WRAPPING.intersection(key.split("."))]
    named = sorted({factors.adapter for factors in factors_of(keys)} - {""})
    if wrapped:
        word = next(part for part in wrapped[0].split(".") if part in WRAPPING)
        yield _finding(
            f"{len(wrapped)} of {plural(len(keys), 'key')} carry {word}., which a wrapper puts there",
            word,
            Severity.WARNING,
            notes=_listed("keys", braces(wrapped)),
            why="peft finds none of these in a model without that wrapper, warns, and keeps the initial values",
            hint=f"strip {word}. from the keys, or save the model inside the wrapper",
        )
    elif not any(key.startswith("base_model.") for key in keys):
        yield _finding(
            f"no key starts with {PREFIX}",
            PREFIX,
            notes=_listed("keys", braces(keys)),
            why="PeftModel.from_pretrained finds none of them, warns, and keeps the initial values",
            hint=f"put {PREFIX} before every key, or save with save_pretrained",
        )
    if named:
        yield _finding(
            f"the name of the adapter ({', '.join(named[:_SHOWN])}) is part of the keys, as in memory",
            "name",
            Severity.WARNING,
            notes=_listed("keys", braces(keys)),
            why="peft puts the name there itself: release 0.21 finds the keys only under this name, 0.17 under none; "
            "whatever is not found keeps its initial values",
            hint="strip the name from the keys, or save with save_pretrained",
        )


def _native(modules: Iterable[str]) -> list[str]:
    """The modules with names of Megatron-Core in a block of layers whose other modules have those of transformers."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        blocks[parse(module).block].append(module)
    mixed = [own for block, own in blocks.items() if block and any(_last(module) in _PROVEN_BY for module in own)]
    return [module for own in mixed for module in own if _last(module) in _NATIVE]


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _of_native(modules: list[str]) -> Finding:
    return _finding(
        f"{plural(len(modules), 'module')} {'has' if len(modules) == 1 else 'have'} a name of Megatron-Core, others of "
        "the same layers have names of transformers",
        "native",
        notes=_listed("modules", braces(modules)),
        why="no model has both, so peft does not find one part, warns, and keeps the initial values",
        hint="export the adapter again with a map of names that covers these modules",
    )


def _layers(modules: Iterable[str], total: int) -> Iterator[Finding]:
    """Layers at an end of the base model of which no adapter is stored."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for module in modules:
        key = parse(f"{module}.weight")
        if key.layer is not None and key.function in _ATTENTION:
            blocks[key.block].add(key.layer)
    stored = next(iter(blocks.values())) if len(blocks) == 1 else set()
    is_run = bool(stored) and max(stored) - min(stored) < len(stored) < total and max(stored) < total
    if is_run:
        yield _finding(
            f"adapters are stored for layer{'s' if len(stored) > 1 else ''} {ranges(stored)}, "
            f"but the base model has {total} layers",
            "layers",
            why="peft warns that the keys are missing and keeps the initial values: the adapter does nothing there",
            hint=f"gather the adapter from all pipeline stages, or set layers_to_transform in {ADAPTER_CONFIG}",
        )


def _ranks(ckpt: Checkpoint, config: AdapterConfig) -> Iterator[Finding]:
    """Modules of another rank than the configuration gives them, one finding for each rank."""
    odd: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for factors in factors_of(ckpt.tensors):
        shape = ckpt.tensors[factors.keys["A"]].global_shape if "A" in factors.keys else ()
        expected = config.ranks_of(factors.module)
        if len(shape) < 2 or 0 in shape or not expected or shape[0] in expected:
            continue
        module = factors.module
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        if any(shape[0] % rank == 0 for rank in config.ranks_of_experts(module)):
            continue
        odd.setdefault((shape[0], tuple(sorted(expected))), []).append(factors.keys["A"])
    for (rank, expected_ranks), keys in odd.items():
        wanted, verb = " or ".join(map(str, expected_ranks)), "have" if len(keys) > 1 else "has"
        yield _finding(
            f"{plural(len(keys), 'module')} {verb} rank {rank}, but {ADAPTER_CONFIG} says {wanted}",
            f"rank {rank}",
            at=Location.of(ckpt.tensors[keys[0]]),
            notes=(
                ("declared", f"r {config.rank}, rank_pattern of {plural(len(config.ranks), 'name')}"),
                *_listed("keys", braces(keys)),
            ),
            why="peft builds the adapter with the declared rank and stops with a size mismatch",
            hint=f"set r or rank_pattern in {ADAPTER_CONFIG} as the run had it, and lora_alpha with it",
        )


def _magnitudes(ckpt: Checkpoint, config: AdapterConfig) -> Iterator[Finding]:
    """DoRA has a magnitude for every module, and plain LoRA for none."""
    modules = [f for f in factors_of(ckpt.tensors) if not config.ranks_of_experts(f.module)]
    with_one = [f for f in modules if "magnitude" in f.keys]
    if config.magnitudes and len(with_one) < len(modules):
        keys = [next(iter(f.keys.values())) for f in modules if "magnitude" not in f.keys]
        yield _finding(
            f"use_dora is true, but {len(keys)} of {plural(len(modules), 'module')} have no magnitude vector",
            "magnitude",
            notes=_listed("modules", braces(keys)),
            why="peft warns and takes the norms of the base model instead of what was trained",
            hint="save again with save_pretrained",
        )
    elif with_one and not config.magnitudes:
        verb = "is" if len(with_one) == 1 else "are"
        yield _finding(
            f"use_dora is not set, but {plural(len(with_one), 'magnitude vector')} {verb} stored",
            "use_dora",
            Severity.WARNING,
            why="peft then ignores these, so the adapter differs from the one that was trained",
            hint=f"set use_dora in {ADAPTER_CONFIG} as the run had it",
        )


def _targets(modules: set[str], config: AdapterConfig) -> Iterator[Finding]:
    """Names in `target_modules` that no stored module has."""
    stored = {end for module in modules for end in endings(module)}
    lost = [name for name in config.targets if name not in stored and name not in config.saved]
    lost = [name for name in lost if config.exclusion_of(name) != "all"]
    sure = [name for name in lost if not config.exclusion_of(name)]
    proven = {name for name in sure if _PROVEN_BY.get(name, frozenset()) & stored or _has_number(name)}
    surely, perhaps = [n for n in lost if n in proven], [n for n in lost if n not in proven]
    for names, severity in ((surely, Severity.WARNING), (perhaps, Severity.INFO)):
        if names:
            is_sure, them = severity is Severity.WARNING, "it" if len(names) == 1 else "them"
            yield _finding(
                f"target_modules names {_quoted(names)}, but no adapter of {them} is stored",
                "target_modules",
                severity,
                why="peft warns that the keys are missing and keeps the initial values: the adapter does nothing there"
                if is_sure
                else "the base model may have no such module; if it has one, its adapter is lost",
                hint="take them from an earlier save, or save again" if is_sure else "",
            )


def _has_number(name: str) -> bool:
    """Whether it names one layer, as no list does that was made for several models."""
    return any(part.isdigit() for part in name.split("."))


def _saved(ckpt: Checkpoint, config: AdapterConfig) -> Iterator[Finding]:
    """Names in `modules_to_save` of which nothing is stored."""
    paths = [f".{key}." for key in ckpt.tensors if ".lora_" not in key]
    parts = {end for path in paths for end in path.split(".")}
    stored = {name for name in config.saved if name in parts or ("." in name and any(f".{name}." in p for p in paths))}
    for names in _ALTERNATIVES:  # lists carry both names of a head; of two that are tied one may be stored
        if stored & names:
            stored |= names
    lost = [name for name in config.saved if name not in stored]
    if lost:
        yield _finding(
            f"modules_to_save names {_quoted(lost)}, but nothing of {'it' if len(lost) == 1 else 'them'} is stored",
            "modules_to_save",
            Severity.WARNING,
            why="peft stops with a KeyError",
            hint="save again with save_pretrained; if the run is gone, remove the name and lose what was trained",
        )


def _finding(
    message: str,
    what: str,
    severity: Severity | None = None,
    at: Location | None = None,
    notes: tuple[Note, ...] = (),
    why: str = "",
    hint: str = "",
) -> Finding:
    return Finding(
        message,
        at=at or Location(file=ADAPTER_CONFIG),
        identity=(what,),
        severity=severity,
        notes=notes,
        why=why,
        hint=hint,
        group=message,
    )


def _listed(label: str, texts: list[str]) -> tuple[Note, ...]:
    return ((label, some(texts, _SHOWN)),)


def _quoted(names: list[str]) -> str:
    return some((printable(name[:_LONGEST]) for name in names), _SHOWN)
