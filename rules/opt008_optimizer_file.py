from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from math import prod

from ckptlint.analysis.fit.judgement import has_known_config
from ckptlint.model import Checkpoint, OptimizerFile
from ckptlint.model.text import first_few, numbered, plural, printable, shape_text
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import is_adapter, parse

_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_PROJECTED = "rank"  # GaLore, APOLLO: moments of fewer rows than their parameters
_NAMED = 6


@rule("OPT008", "optimizer-file", Severity.WARNING)
def optimizer_file(ckpt: Checkpoint) -> Iterator[Finding]:
    """The optimizer's file contradicts itself or the weights beside it.

    What it checks:
        In `optimizer.pt`, `optimizer.bin`, a `.ckpt` and the first rank's file of a set, the groups list each parameter
        once, and every parameter that has state. `exp_avg` and `exp_avg_sq` of a parameter have one shape. Groups of an
        optimizer with `betas` have state if `trainer_state.json` says a step above 0.

        Moments keyed by name have the shapes of the tensors of these names. Of moments keyed by number, as many have
        each shape as tensors of the step's models do: a warning if all others match one to one, all hold one 1/k of
        their parameters, or all are one-dimensional, fit nothing and hold fewer elements than the weights; otherwise
        info, since weights may be saved in another form. That just the last layers lack moments, of all that the groups
        list, is a warning. Tied and frozen parameters, adapters, factored states and projected ones (GaLore) are no
        findings.
    Why it matters:
        A resume fails at the first step, or continues with the moments of other parameters.
    Usual causes:
        The file belongs to another run or step; an embedding was resized after the step; the groups were built anew.
    How to fix:
        Restore the optimizer of this step, or resume without one.
    See:
        torch.optim.Optimizer.load_state_dict
    """
    files = [(file.name, file.optimizer) for file in ckpt.step_files if file.optimizer is not None]
    if not files:
        raise NotApplicable("no optimizer in a file of its own")
    step = max((file.step for file in ckpt.step_files if file.step is not None), default=0)
    for name, optimizer in files:
        for sentence, identity, is_unsure in _contradictions(ckpt, name, optimizer, step, is_alone=len(files) == 1):
            confidence: Confidence = "possible" if is_unsure else "certain"
            yield Finding(sentence, at=Location(file=name), identity=(identity,), confidence=confidence, group=sentence)


def _contradictions(
    ckpt: Checkpoint, file: str, optimizer: OptimizerFile, step: int, is_alone: bool
) -> Iterator[tuple[str, str, bool]]:
    """(message, identity, whether it is unsure) for each contradiction in one optimizer's file."""
    listed, shapes = Counter(optimizer.params), optimizer.shapes
    if twice := [param for param, count in listed.items() if count > 1]:
        count = plural(len(twice), "parameter")
        yield f"the groups of {file} list {count} twice: {_params_text(twice)}", "twice", False
    if unlisted := [param for param in shapes if param not in listed]:
        yield f"{file} has state for {_params_text(unlisted)}, which none of its groups lists", "unlisted", False
    if listed and not shapes and step and "betas" in optimizer.settings:
        yield f"{file} has no state for its {plural(len(listed), 'parameter')}, at step {step}", "empty", False
    pairs = {param: (states.get("exp_avg"), states.get("exp_avg_sq")) for param, states in shapes.items()}
    for param, (first, second) in pairs.items():
        if first is not None and second is not None and first != second:
            both = f"the shapes {shape_text(first)} and {shape_text(second)}"
            yield f"exp_avg and exp_avg_sq of {_params_text([param])} in {file} have {both}", f"pair {param}", False
    is_judged = ckpt.format == "verl" and has_known_config(ckpt)  # CFG001 reports what the model lacks
    is_judged = is_alone and ckpt.format in ("safetensors", "torch", "verl") and not is_judged
    if is_judged and ckpt.tensors and ckpt.is_sound and not ckpt.partial_because:
        yield from _against_model(ckpt, file, optimizer)


def _against_model(ckpt: Checkpoint, file: str, optimizer: OptimizerFile) -> Iterator[tuple[str, str, bool]]:
    """(message, identity, is unsure) for moments that misfit the tensor of their name or, numbered, all shapes."""
    moments = {
        param: shape
        for param, states in optimizer.shapes.items()
        if (shape := next((states[name] for name in _ELEMENTWISE if states.get(name)), None))
    }
    model = {key: tensor for key, tensor in ckpt.tensors.items() if parse(key).kind == "model"}
    tensors = {key: tensor.global_shape for key, tensor in model.items() if tensor.dtype in FLOATS}
    # GaLore's moments have fewer rows by design, and quantised weights are not what the optimizer trains.
    if _PROJECTED in optimizer.settings or not moments or len(tensors) < len(model):
        return
    if len(optimizer.params) > len(model) and ckpt.format == "verl" and not all(map(is_adapter, map(parse, model))):
        counts = plural(len(optimizer.params), "parameter"), f"{len(model):,}"
        yield f"{file} lists {counts[0]}, but the files of the model hold {counts[1]}", "count", False
        return
    for param, shape in moments.items():
        states = tensors.get(param) if isinstance(param, str) else None
        if states is not None and states != shape:
            has = f"are {shape_text(shape)}, but the tensor is {shape_text(states)}"
            yield f"the moments of {printable(str(param))} in {file} {has}", str(param), False
    wanted, stored = Counter(moments.values()), Counter(tensors.values())
    if wanted <= stored and (layers := _last_layers(optimizer, moments, tensors)):
        lost = numbered("layer", layers)
        yield f"{file} lists all parameters, but has no moments for {lost}, the last", "last", False
    if any(isinstance(param, str) for param in moments) or wanted <= stored + Counter(optimizer.shapes_beside):
        return
    odd, left = wanted - stored, stored - wanted
    moment_count, weight_count = sum(map(prod, moments.values())), sum(map(prod, tensors.values()))
    # Equal totals in other shapes: tensors that were trained as one and saved apart, such as stacked experts.
    if not odd or moment_count == weight_count:
        return
    # A common 1/k of several shapes, vectors among them, is one rank's share. GaLore projects matrices alone, so a
    # model without vectors proves nothing.
    sizes = sorted(map(prod, moments.values())), sorted(map(prod, tensors.values()))
    shares = {Fraction(*pair) for pair in zip(*sizes, strict=True)} if len(sizes[0]) == len(sizes[1]) else set()
    has_vector = len(set(sizes[1])) > 1 and any(len(shape) == 1 for shape in tensors.values())
    if len(shares) == 1 and (share := shares.pop()) < 1 == share.numerator and has_vector:
        yield f"all moments in {file} hold {share} of their parameters' elements", "share", False
        return
    shapes = ", ".join(map(shape_text, list(odd)[:_NAMED]))
    # FSDP1 trains flat parameters; its first rank's optimizer, saved as the whole, has only vectors that fit nothing
    # (transformers#23111). The files of verl hold one rank's part by design.
    is_flat = ckpt.format != "verl" and all(len(shape) == 1 for shape in moments.values())
    if is_flat and moment_count < weight_count and not wanted & stored:
        fit = f"no tensor: {moment_count:,} of {weight_count:,} elements, one rank's part saved as the whole"
        yield f"the moments in {file} are one-dimensional and fit {fit}", "part", False
        return
    # Few moments without a tensor and as many tensors without moments: a weight was resized after the save. More of
    # them may as well be weights that were saved in another form (merged, split, fused).
    is_one_to_one = odd.total() == left.total() and 2 * odd.total() < len(moments)
    of = f"{odd.total()} of {plural(len(moments), 'parameter')} in {file}"
    yield f"too few tensors have the moment shapes of {of}: {shapes}", f"shapes {shapes}", not is_one_to_one


def _last_layers(
    optimizer: OptimizerFile, moments: dict[int | str, tuple[int, ...]], tensors: dict[str, tuple[int, ...]]
) -> list[int]:
    """Numbers of the last layers, if the listed parameters without moments are exactly theirs; [] otherwise."""
    # Numbered parameters have no names. Groups list them in the order of the model, so layers are the last if only
    # parameters outside of layers come after them. Frozen first layers, or all layers frozen, are a choice.
    without = [index for index, param in enumerate(optimizer.params) if param not in moments]
    keys = sorted((key for key in map(parse, tensors) if key.block), key=lambda key: key.layer or 0)
    rest, lost = keys[: -len(without)], keys[-len(without) :]
    if not rest or len({key.block for key in keys}) != 1 or len(optimizer.params) != len(tensors):
        return []
    is_like_others = {key.role for key in lost} <= {key.role for key in rest}
    is_last = len(optimizer.params) - 1 - without[-1] <= len(tensors) - len(keys) and rest[-1].layer != lost[0].layer
    lack = Counter(tensors.values()) - Counter(moments.values())
    is_all = is_last and is_like_others and Counter(tensors[key.fqn] for key in lost) == lack
    return [key.layer or 0 for key in lost] if is_all else []


def _params_text(params: list[int | str]) -> str:
    shown = first_few([printable(str(param)) for param in params], _NAMED)
    return f"{'parameters' if len(params) > 1 else 'parameter'} {shown}"
