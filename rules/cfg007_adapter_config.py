from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckptlint.analysis.optimizer.records import highest_step
from ckptlint.architecture.adapters import PREFIX, AdapterConfig, Factors, endings, factors_of, read_adapter_config
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, ModelConfig, PayloadTable
from ckptlint.model.text import first_names, fold_names, numbered, plural, printable, ranges
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.config_fields import ADAPTER_CONFIG
from ckptlint.vocabulary.keys import WRAPPING, parse

_SHOWN = 6
_FEW = 4  # a lack counts as a loss if at least four times as many layers or modules are complete
_SPARSEST = 2  # the highest layer number per stored layer; a key may hold any number, also an absurd one
_LONGEST = 60
_HEAD, _TABLES = ("classifier", "score"), ("embed_tokens", "lm_head")
_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")
"""Tasks for which peft adds both names of a head.

Source: peft 0.21 peft_model.PeftModelForSequenceClassification, PeftModelForTokenClassification
"""
_NATIVE = frozenset({"linear_qkv", "linear_q", "linear_kv", "linear_proj", "linear_fc1", "linear_fc2"})
_PROVEN_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})),
    **dict.fromkeys(("up_proj", "down_proj"), frozenset({"gate_proj", "up_proj", "down_proj"})),
}
"""Module -> modules that no model has without it: if one of those is stored, the model has this one too."""
_ATTENTION = ("q", "k", "v", "qkv", "attn_out")


@rule("CFG007", "adapter-config", Severity.ERROR)
def adapter_config(ckpt: Checkpoint) -> Iterator[Finding]:
    """The keys or ranks of an adapter do not match its `adapter_config.json`.

    What it checks:
        For adapters of type LORA, the rank of every module is `r`, or what `rank_pattern` gives it; factors of fused
        experts are a multiple of it. Patterns that are more than plain text are never run: their ranks are allowed
        everywhere. `use_dora` comes with magnitude vectors. No module is scaled by a `lora_alpha` of 0, and a list in
        `target_modules` names each module that has factors. Every name in `target_modules` and `modules_to_save` is
        stored, unless `exclude_modules` takes it out: a missing one is a warning, or info for names that many lists
        carry and the base model need not have. It is an error for embeddings and heads that the base model must have,
        and without any head for the tasks SEQ_CLS and TOKEN_CLS.

        Keys that peft does not find are an error if none has `base_model.model.`, if a wrapper left its name in them,
        or if a layer mixes names of Megatron-Core and transformers; with the name of an adapter in them, a warning. If
        the base model's `config.json` is beside it, adapters of the attention are not at one end of its layers alone.
        A few layers in a row without factors are a warning, an adapter without a configuration is an error. At depth
        data, a few factors B of zeros among others are a warning; so are all in a trained step, or beside factors A
        of zeros.
    Why it matters:
        peft stops if the rank differs. Whatever it does not find keeps its initial values, after a warning at most.
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
            message = f"{ckpt.metadata_file} is here without {ADAPTER_CONFIG}"
            why = "peft cannot load it, and the factor that scales it (lora_alpha / r) is stored nowhere else"
            hint = "copy it from where the adapter was written"
            yield Finding(message, at=Location(file=ckpt.metadata_file), identity=(ADAPTER_CONFIG,), why=why, hint=hint)
        return
    config = read_adapter_config(ckpt.config.values)
    if config.kind != "LORA" or not ckpt.tensors:
        raise NotApplicable(f"its type is {printable(config.kind[:_LONGEST]) or 'not given'}; only LORA is judged here")
    modules = {factors.module: factors for factors in factors_of(ckpt.tensors)}
    if not modules:
        yield _finding(
            f"{ADAPTER_CONFIG} says LORA, but none of {plural(len(ckpt.tensors), 'tensor')} is a LoRA factor", "factors"
        )
        return
    yield from _wrong_names(ckpt)
    yield from _zero_scale(modules.values(), ckpt, config)
    yield from _wrong_ranks(ckpt, config)
    yield from _magnitudes(ckpt, config)
    if native := _with_native_names(modules):
        yield _finding(
            f"{plural(len(native), 'module', 'has')} a Megatron-Core name, others in "
            "the same layers have transformers names",
            "native",
            notes=_name_notes("modules", native),
            why="no model has both, so peft misses one kind, warns, and keeps the initial values",
            hint="export the adapter again with a key mapping that covers these modules",
        )
    else:
        yield from _missing_targets(set(modules), config)
        yield from _unlisted_modules(set(modules), config)
    yield from _missing_saved_modules(ckpt, config, modules)
    if not config.is_explicit and not any(map(_has_number, config.targets)):
        yield from _missing_layers(modules, ckpt.config)
        yield from _layer_gaps(modules.values())
    if ckpt.payload is not None:
        yield from _zero_factors(ckpt, ckpt.payload, modules.values())


def _wrong_names(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on key names that peft does not look for, one for each kind of fault in them."""
    keys = list(ckpt.tensors)
    wrapped = [key for key in keys if _wrapping(key)]
    named = sorted({factors.adapter for factors in factors_of(keys)} - {""})
    if wrapped:
        word = _wrapping(wrapped[0])
        yield _finding(
            f"{len(wrapped)} of {plural(len(keys), 'key')} contain {word}., left by a model wrapper",
            word,
            notes=_name_notes("keys", wrapped),
            why="a model without that wrapper has no such keys: peft warns and keeps the initial values",
            hint=f"strip {word}. from the keys, or save the unwrapped model",
        )
    elif not any(key.startswith("base_model.") for key in keys):
        why = "PeftModel.from_pretrained finds none of them, warns, and keeps the initial values"
        hint = f"put {PREFIX} before every key, or save with save_pretrained"
        yield _finding(f"no key starts with {PREFIX}", PREFIX, notes=_name_notes("keys", keys), why=why, hint=hint)
    if named:
        yield _finding(
            f"the name of the adapter ({', '.join(named[:_SHOWN])}) is part of the keys, as in memory",
            "name",
            Severity.WARNING,
            notes=_name_notes("keys", keys),
            why="peft puts the name there itself: release 0.21 finds the keys only under this name, 0.17 under none; "
            "whatever is not found keeps its initial values",
            hint="strip the name from the keys, or save with save_pretrained",
        )


def _wrapping(key: str) -> str:
    """The wrapper's name in a key, "" if there is none; `module` counts only in front of the whole model."""
    words = key.removeprefix(PREFIX).split(".")
    return next((word for word in words if word in WRAPPING), "module" if words[0] == "module" else "")


def _zero_scale(modules: Iterable[Factors], ckpt: Checkpoint, config: AdapterConfig) -> Iterator[Finding]:
    # A configuration may set lora_alpha to 0 and give each module its own by alpha_pattern, which is no fault.
    ranks = {f.module: ckpt.tensors[f.keys["A"]].global_shape[:1] for f in modules if "A" in f.keys}
    nothing = [module for module, rank in ranks.items() if rank and config.scale_of(module, rank[0]) == 0]
    if nothing and config.alpha == 0:
        message = f"lora_alpha is 0 for {len(nothing)} of {plural(len(ranks), 'module')}"
        why = "peft multiplies the factors by lora_alpha / r, so the adapter does nothing"
        hint = f"set lora_alpha in {ADAPTER_CONFIG} to the value of the run"
        yield _finding(message, "lora_alpha", notes=_name_notes("modules", nothing), why=why, hint=hint)


def _with_native_names(modules: Iterable[str]) -> list[str]:
    """The modules with Megatron-Core names in blocks that also have modules with transformers names."""
    # Megatron-Core names alone prove nothing (vision towers have a linear_fc1 too). No model has both kinds in one
    # block, so a mix means that the key map of the export missed some modules.
    blocks = grouped((block, module) for module in modules if (block := parse(module).block))
    mixed = [members for members in blocks.values() if any(_module_name(name) in _PROVEN_BY for name in members)]
    return [module for members in mixed for module in members if _module_name(module) in _NATIVE]


def _module_name(module: str) -> str:
    return module.rpartition(".")[2]


def _missing_layers(modules: Iterable[str], config: ModelConfig) -> Iterator[Finding]:
    """A finding if the attention adapters are those of one run of layers, and the base model has more."""
    from ckptlint.architecture.huggingface import is_known_model

    total = config.base_layers
    # One pipeline stage saved alone leaves such a run. Only attention counts: adapters of an MLP may exist only where
    # the model has dense layers, and a hybrid model has attention in some layers, which leave no unbroken run.
    blocks: dict[str, set[int]] = defaultdict(set)
    for module in modules:
        key = parse(f"{module}.weight")
        if key.layer is not None and key.function in _ATTENTION:
            blocks[key.block].add(key.layer)
    stored = next(iter(blocks.values())) if len(blocks) == 1 else set()
    if stored and max(stored) - min(stored) < len(stored) < total and max(stored) < total:
        yield _finding(
            f"adapters are stored for {numbered('layer', stored)}, but the base model has {total} layers",
            "layers",
            None if is_known_model(config.base) else Severity.INFO,  # whose configuration may count something else
            why="peft warns that the keys are missing and keeps the initial values: the adapter does nothing there",
            hint=f"gather the adapter from all pipeline stages, or set layers_to_transform in {ADAPTER_CONFIG}",
        )


def _wrong_ranks(ckpt: Checkpoint, config: AdapterConfig) -> Iterator[Finding]:
    odd: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for factors in factors_of(ckpt.tensors):
        shape = ckpt.tensors[factors.keys["A"]].global_shape if "A" in factors.keys else ()
        expected = config.ranks_of(factors.module)
        if len(shape) < 2 or 0 in shape or not expected or shape[0] in expected:
            continue
        # peft stacks the factors of all experts of a fused module along the rank.
        if any(shape[0] % rank == 0 for rank in config.ranks_of_experts(factors.base_module)):
            continue
        odd.setdefault((shape[0], tuple(sorted(expected))), []).append(factors.keys["A"])
    for (rank, expected_ranks), keys in odd.items():
        wanted = " or ".join(map(str, expected_ranks))
        yield _finding(
            f"{plural(len(keys), 'module', 'has')} rank {rank}, but {ADAPTER_CONFIG} says {wanted}",
            f"rank {rank}",
            at=Location(ckpt.tensors[keys[0]]),
            notes=(
                ("declared", f"r {config.rank}, rank_pattern of {plural(len(config.ranks), 'name')}"),
                *_name_notes("keys", keys),
            ),
            why="peft builds the adapter with the declared rank and stops with a size mismatch",
            hint=f"set r or rank_pattern and lora_alpha in {ADAPTER_CONFIG} to the values of the run",
        )


def _magnitudes(ckpt: Checkpoint, config: AdapterConfig) -> Iterator[Finding]:
    modules = [f for f in factors_of(ckpt.tensors) if not config.ranks_of_experts(f.module)]
    with_one = [f for f in modules if "magnitude" in f.keys]
    if config.magnitudes and len(with_one) < len(modules):
        keys = [next(iter(f.keys.values())) for f in modules if "magnitude" not in f.keys]
        message = f"use_dora is true, but {len(keys)} of {plural(len(modules), 'module')} have no magnitude vector"
        why = "peft warns and uses the norms of the base model instead of the trained magnitudes"
        yield _finding(
            message, "magnitude", notes=_name_notes("modules", keys), why=why, hint="save again with save_pretrained"
        )
    elif with_one and not config.magnitudes:
        yield _finding(
            f"use_dora is not set, but {plural(len(with_one), 'magnitude vector', 'is')} stored",
            "use_dora",
            Severity.WARNING,
            why="peft then ignores these, so the adapter differs from the one that was trained",
            hint=f"set use_dora in {ADAPTER_CONFIG} to the value of the run",
        )


def _missing_targets(modules: set[str], config: AdapterConfig) -> Iterator[Finding]:
    """Findings on names in `target_modules` that no stored module has."""
    # Lists of targets are often made for several models, and peft ignores a name that the model lacks. It is a loss
    # only if the model must have the module: a sibling of it is stored, or the name holds the number of a layer.
    stored = {end for module in modules for end in endings(module)}
    lost = [name for name in config.targets if name not in stored and name not in config.saved]
    lost = [name for name in lost if config.exclusion_of(name) != "all"]
    not_excluded = [name for name in lost if not config.exclusion_of(name)]
    proven = {name for name in not_excluded if _PROVEN_BY.get(name, frozenset()) & stored or _has_number(name)}
    for is_sure in (True, False):
        if names := [name for name in lost if (name in proven) == is_sure]:
            them = "it" if len(names) == 1 else "them"
            yield _finding(
                f"target_modules names {_quoted(names)}, but no adapter for {them} is stored",
                "target_modules",
                Severity.WARNING if is_sure else Severity.INFO,
                why="peft warns that the keys are missing and keeps the initial values: the adapter does nothing there"
                if is_sure
                else "the base model may have no such module; if it has one, its adapter is lost",
                hint="take them from an earlier save, or save again" if is_sure else "",
            )


def _unlisted_modules(modules: set[str], config: AdapterConfig) -> Iterator[Finding]:
    targets = set(() if config.parameters else config.targets)
    odd = [module for module in modules if targets and targets.isdisjoint(endings(module))]
    if odd:
        message = f"target_modules lists none of {plural(len(odd), 'module')} with factors"
        why = "peft builds no adapter there and ignores the factors, so the adapter does nothing there"
        hint = f"add them to target_modules in {ADAPTER_CONFIG}"
        yield _finding(message, "untargeted", notes=_name_notes("modules", sorted(odd)), why=why, hint=hint)


def _layer_gaps(modules: Iterable[Factors]) -> Iterator[Finding]:
    """Findings on a few consecutive layers without factors in a block whose other layers have some."""
    # Lost layers are few and lie in a row. Hybrid models have attention in every n-th layer, and the first layers of a
    # mixture may have no experts, so an adapter of experts alone may begin later: neither is reported.
    blocks: dict[str, set[int]] = defaultdict(set)
    dense_blocks = set[str]()
    for factors in modules:
        key = parse(f"{factors.module}.weight")
        if key.layer is not None:
            blocks[key.block].add(key.layer)
            dense_blocks |= set() if key.in_experts else {key.block}
    for block, stored in blocks.items():
        span = max(stored) + 1
        lost = sorted({*range(span)} - stored) if span <= _SPARSEST * len(stored) else []
        is_architecture = block not in dense_blocks and lost[:1] == [0]
        if lost and not is_architecture and lost[-1] - lost[0] < len(lost) and len(stored) >= _FEW * len(lost):
            which = f"{numbered('layer', lost)} of {block}"
            message = f"no adapter of {which} is stored, but those of {len(stored)} other layers are"
            why = "peft warns that the keys are missing and keeps the initial values: the adapter does nothing there"
            hint = "take them from an earlier save, or save again"
            yield _finding(message, "gap", Severity.WARNING, notes=(("layers", ranges(stored)),), why=why, hint=hint)


def _zero_factors(ckpt: Checkpoint, payload: PayloadTable, modules: Iterable[Factors]) -> Iterator[Finding]:
    # peft initialises B with zeros and A at random, so zeros in B are normal before training. They are a loss if most
    # other factors B were trained, if the step is above 1 (a warm-up begins at a rate of 0), or if A is zero too, which
    # no initialisation gives.
    pairs = [f.keys for f in modules if {"A", "B"} <= f.keys.keys() and not parse(f.keys["B"]).in_experts]
    factors = [ckpt.tensors[key] for keys in pairs for key in (keys["A"], keys["B"])]
    if any((factor.chunks.record < 0).any() or not payload.scanned[factor.chunks.record].all() for factor in factors):
        return
    zeros = {factor.fqn for factor in factors if payload.zeros[factor.chunks.record].sum() == factor.volume}
    dead = [keys["B"] for keys in pairs if {keys["A"], keys["B"]} <= zeros]
    keys = dead or [keys["B"] for keys in pairs if keys["B"] in zeros]
    step = highest_step(ckpt)
    is_lone = 0 < _FEW * len(keys) <= len(pairs) - len(keys)
    if dead or is_lone or (keys and len(keys) == len(pairs) and step > 1):
        where = "so does factor A" if dead else "the others were trained" if is_lone else f"this is step {step:,}"
        yield _finding(
            f"factor B of {plural(len(keys), 'module')} holds only zeros, {'and' if dead else 'but'} {where}",
            "zeros",
            Severity.WARNING,
            at=Location(keys[0]),
            notes=_name_notes("keys", keys),
            why="the product of the factors is 0: the adapter does nothing there"
            + ", and no gradient ever reaches it" * bool(dead),
            hint="see whether the optimizer had these parameters, and whether they were gathered before the save",
        )


def _has_number(name: str) -> bool:
    """Whether the name holds a layer's number, so that the list was made for this model."""
    return any(word.isdigit() for word in name.split("."))


def _missing_saved_modules(ckpt: Checkpoint, config: AdapterConfig, modules: Iterable[str]) -> Iterator[Finding]:
    """Findings on names that peft saves in full (`modules_to_save`, a classifier's head), but which are not stored."""
    paths = [f".{key}." for key in ckpt.tensors if ".lora_" not in key]
    key_parts = {end for path in paths for end in path.split(".")} | {*map(_module_name, modules)}
    names = dict.fromkeys((*config.saved, *(_HEAD if config.task in _CLASSIFIERS and not paths else ())))
    stored = {name for name in names if name in key_parts or ("." in name and any(f".{name}." in p for p in paths))}
    # Lists name a head in both usual ways, and of two tied tables one may be stored: half of a pair is enough.
    for pair in (_HEAD, _TABLES):
        if key_parts.intersection(pair):
            stored |= {*pair}
    lost = [name for name in names if name not in stored]
    is_known_models = any(".model.layers." in module for module in modules)
    # Every causal model has token tables and every classifier a head; another name may be of another model's list.
    is_sure = (not paths and {*_HEAD} <= {*lost}) or (is_known_models and not {*_TABLES}.isdisjoint(lost))
    names_them = "modules_to_save names" if {*lost} & {*config.saved} else f"for {config.task} peft loads"
    if lost:
        message = f"{names_them} {_quoted(lost)}, but nothing of {'it' if len(lost) == 1 else 'them'} is stored"
        why = "peft stops with a KeyError"
        hint = "save again with save_pretrained; if the run is gone, remove the name and lose what was trained"
        yield _finding(message, "modules_to_save", None if is_sure else Severity.WARNING, why=why, hint=hint)


def _finding(
    message: str,
    what: str,
    severity: Severity | None = None,
    at: Location | None = None,
    notes: tuple[Note, ...] = (),
    why: str = "",
    hint: str = "",
) -> Finding:
    """A finding on the adapter's configuration; by default a warning on the file."""
    at = at or Location(file=ADAPTER_CONFIG)
    return Finding(message, at=at, identity=(what,), severity=severity, notes=notes, why=why, hint=hint, group=message)


def _name_notes(label: str, names: Iterable[str]) -> tuple[Note, ...]:
    return ((label, first_names(fold_names(names), _SHOWN)),)


def _quoted(names: list[str]) -> str:
    return first_names((printable(name[:_LONGEST]) for name in names), _SHOWN)
