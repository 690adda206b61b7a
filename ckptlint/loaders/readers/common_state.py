"""The common state from where a writer put it: `common.pt`, a `common_state` object, or entries of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptlint.errors import ForeignError, LimitError, UnreadableError
from ckptlint.formats.pointers import pointer_in
from ckptlint.formats.torch_archive import PICKLE_LIMIT, ranges_in
from ckptlint.formats.torch_file import TorchFile, number_in, read_torch_bytes, read_torch_file
from ckptlint.grouping import grouped
from ckptlint.loaders.problems import from_error, from_refusals, from_torch_file
from ckptlint.model import Checkpoint, CommonState, Declared, ModelConfig, Problem, StepClaim
from ckptlint.model.text import printable
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.config_fields import MODEL_CONFIG, attributes, read_declared
from ckptlint.vocabulary.frameworks import world

COMMON_FILE = "common.pt"
COMMON_ENTRY = "common_state/shard_0_1"
RUN_CONFIG = "run_config.yaml"
OWN_ENTRIES = ("args", "checkpoint_version", "iteration")

MODEL_CONFIG_LIMIT = 2 * 1024**2  # labels of 20,000 classes, twice, are 1.5 MB
_CONTAINERS_LIMIT = 50_000  # lists and objects, each of which takes up to 232 bytes
_NESTED_LIMIT = 12
_YAML_LIMIT, _YAML_VALUES = 4 * 1024**2, 100_000  # a thousand lines are usual, tens of thousands of data files possible
_YAML_SCALAR = 4096  # characters of a value that may be more than a text
_OBJECT_LIMIT, _CLAIM_LIMIT, _MOST_CLAIMS, _MOST_NUMBERS = 16 * 1024**2, 64 * 1024, 8, 256

StoragePlace = tuple[str, int, int]  # raw file path, byte offset and byte length of a record


def read_common(folder: Folder, entries: dict[str, StoragePlace]) -> tuple[CommonState | None, list[Problem]]:
    """The common state, from `common.pt` or the records of these entries, and what stood in the way of reading it.

    Source: megatron.core.dist_checkpointing.strategies.common (<= 0.18: `common.pt`; 0.19: one ShardedObject holding a
    list of one dict); megatron.training.checkpointing for fsdp_dtensor and torch_dcp (one entry per value).
    """
    if folder.has(COMMON_FILE):
        return _decoded(COMMON_FILE, lambda: read_torch_file(folder, COMMON_FILE))
    if COMMON_ENTRY in entries:
        return _decoded(COMMON_ENTRY, lambda: read_torch_bytes(_record(folder, entries[COMMON_ENTRY])))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in OWN_ENTRIES:
        if name in entries:
            location = entries[name]
            common, entry_problems = _decoded(name, lambda at=location: read_torch_bytes(_record(folder, at)), name)  # type: ignore[misc]
            problems += entry_problems
            if common is not None:
                values |= common.values
    return (CommonState("entries " + ", ".join(values), values) if values else None), problems


def read_objects(folder: Folder, entries: dict[str, StoragePlace]) -> tuple[dict[str, Any], list[Problem]]:
    """The contents of small ShardedObjects by entry name, and what they must not hold.

    Source: megatron.core.dist_checkpointing.mapping.ShardedObject: stored as a list of the objects under one key
    """
    problems: list[Problem] = []
    small = {name: location for name, location in entries.items() if location[2] <= _OBJECT_LIMIT}
    files = ((name, _entry(folder, name, location, problems)) for name, location in small.items())
    values = {name: file.root[0] for name, file in files if file and isinstance(file.root, list) and file.root}
    return values, problems


def read_claims(folder: Folder, entries: dict[str, StoragePlace]) -> tuple[tuple[StepClaim, ...], list[Problem]]:
    """What small entries with the names of counters (`is_counter`) say of the step, and what they must not hold.

    Source: torchtitan 0.2.2 Trainer.state_dict: `step` as an integer (0.0.2: a tensor without axes) under `train_state`
    """
    claims: list[StepClaim] = []
    problems: list[Problem] = []
    for name in [*entries][:_MOST_CLAIMS]:
        if entries[name][2] > _CLAIM_LIMIT or (torch_file := _entry(folder, name, entries[name], problems)) is None:
            continue
        path, offset, length = entries[name]
        read = ranges_in(folder.read_range(path, offset, length))
        if (step := number_in(read, torch_file, torch_file.root)) is not None:
            claims.append(StepClaim(printable(name), step))
    return tuple(claims), problems


def unlike_records(folder: Folder, entries: dict[str, StoragePlace]) -> dict[str, StoragePlace]:
    """One small entry of those whose records hold the same bytes, the most frequent first."""
    alike = grouped(
        (hash(folder.read_range(*place)), name)
        for name, place in entries.items()
        if 0 < place[2] <= _CLAIM_LIMIT and place[1] >= 0 and folder.stat(place[0])[0] in READABLE
    )
    return {names[0]: entries[names[0]] for names in sorted(alike.values(), key=len, reverse=True)}


def read_numbers(folder: Folder, ckpt: Checkpoint) -> dict[str, int | float]:
    """The numbers that a checkpoint keeps in small entries of their own, by name; none over a network."""
    numbers: dict[str, int | float] = {}
    for entry in ckpt.byte_objects[:_MOST_NUMBERS] if folder.is_near else ():
        label, offset, length = ckpt.byte_range_of(entry.record) if entry.record >= 0 else ("", 0, 0)
        path = ckpt.files[int(ckpt.records.file[entry.record])].path if label else None
        if path is not None and length <= _CLAIM_LIMIT:
            try:
                torch_file = _entry(folder, entry.fqn, (path, offset, length), [])
            except UnreadableError:
                continue  # the check names it
            if torch_file is not None and type(torch_file.root) in (int, float):
                numbers[entry.fqn] = torch_file.root
    return numbers


def read_configs(
    folder: Folder, common: CommonState | None, is_export: bool = False
) -> tuple[dict[str, Declared], ModelConfig | None, list[Problem]]:
    """What the job declared, and the configuration of its model as it stands in `config.json`.

    Declared is what the arguments of the common state say, `run_config.yaml`, and the `config.json` of the folder
    itself, which no load of an export goes without. Where that folder has none, the model's configuration may lie in
    one of the folders below it that frameworks keep it in. Before it go the arguments that Megatron builds its model
    from.

    Source: `args` of megatron.training.checkpointing; `run_config.yaml` of Megatron-Bridge; `config.json` of
    transformers; `huggingface/` of verl's FSDP checkpoints; `.hf_metadata/` of NeMo Automodel
    """
    sources: list[tuple[str, Any]] = [("args", common.values.get("args"))] if common else []
    problems: list[Problem] = []
    if folder.has(RUN_CONFIG):
        try:
            sources.append(("run_config", _yaml(_written(folder, RUN_CONFIG, _YAML_LIMIT).decode())))
        except (ValueError, RecursionError, UnreadableError) as error:
            problems.append(_unread(RUN_CONFIG, error))
    config = None
    places = [(folder, MODEL_CONFIG)]
    places += [(folder.sub(name), f"{name}/{MODEL_CONFIG}") for name in world().models if name in folder.folders()]
    for place, name in places:
        if place.has(MODEL_CONFIG):
            try:
                config = ModelConfig(name, read_model_config(place, MODEL_CONFIG))
            except UnreadableError as error:
                problems.append(_unread(name, error, is_export and place is folder))
            break
    if config is not None and config.file == MODEL_CONFIG:
        sources.append((MODEL_CONFIG, config.values))
    return read_declared(sources), _of_megatron(common, sources) or config, problems


def _of_megatron(common: CommonState | None, sources: list[tuple[str, Any]]) -> ModelConfig | None:
    """The arguments that Megatron builds the model from, None where there are none."""
    by_source = dict(sources)
    if common is not None and attributes(by_source.get("args")):
        return ModelConfig(common.source, attributes(by_source["args"]))
    model = attributes(attributes(by_source.get("run_config")).get("model"))
    return ModelConfig(RUN_CONFIG, model) if model else None


def _unread(name: str, error: Exception, is_needed: bool = False) -> Problem:
    """That a configuration is damaged, or is not used: it breaks a limit, or is no text of its form."""
    if isinstance(error, LimitError) or not isinstance(error, UnreadableError):
        sentence = f"{name} cannot be read ({_reason(error)}); ckptlint does not use what it declares"
        return Problem("unread" if is_needed else "note", name, sentence, why="ckptlint judges the tensors without it")
    why = "a load starts with it, so it fails" if is_needed else "what it declares is lost, and other files may be too"
    hint = "restore it from where the checkpoint was written"
    return replace(from_error(error, name, why=why, hint=hint), outside_checkpoint=not is_needed)


def _reason(error: Exception) -> str:
    return printable(str(error).splitlines()[0][:200]) if str(error) else type(error).__name__


def _written(folder: Folder, name: str, limit: int) -> bytes:
    data = folder.read(name, limit)
    if not data.strip(b"\0"):
        raise UnreadableError(f"is damaged: it {'holds zero bytes alone' if data else 'is empty (0 bytes)'}", 0)
    return data


def read_model_config(folder: Folder, name: str) -> dict[str, Any]:
    """The fields of a model's configuration, from its file; raises LimitError or UnreadableError."""
    data = _written(folder, name, MODEL_CONFIG_LIMIT)
    try:
        return model_config(data)
    except (ValueError, RecursionError) as error:
        damaged = f"is damaged: it is not a JSON object ({_reason(error)})"
        raise UnreadableError(pointer_in(data) or damaged) from None


def model_config(text: bytes) -> dict[str, Any]:
    """The fields of a model's configuration; it may say NaN or a name twice, as the library that reads it allows.

    Raises ValueError or RecursionError for what is no JSON object, LimitError for too many lists and objects.
    """
    if text.count(b"[") + text.count(b"{") > _CONTAINERS_LIMIT:
        raise LimitError(f"it has more than {_CONTAINERS_LIMIT:,} lists and objects")
    values = json.loads(text.decode())
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}")
    return {name: _shallow(value, _NESTED_LIMIT) for name, value in values.items()}


def _shallow(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        return {name: _shallow(inner, levels - 1) for name, inner in value.items()} if levels else {}
    if isinstance(value, list):
        return [_shallow(inner, levels - 1) for inner in value] if levels else []
    return value


def _yaml(text: str) -> Any:
    """A YAML document as plain values; tags of Python objects become the plain value below them.

    Raises ValueError for what is no YAML or contains itself, and LimitError for more values than a configuration needs,
    each counted wherever an alias or a merge repeats it.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that never makes an object, and counts values before it makes any."""

        values = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            before, is_alias = self.values, self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if isinstance(node, yaml.ScalarNode) and len(node.value) > _YAML_SCALAR:
                node.tag = "tag:yaml.org,2002:str"  # making a number of `1:1:1:...` takes the square of its length
            if is_alias and id(node) not in sizes:
                raise ValueError("a value contains itself")
            self.values = before + sizes[id(node)] if is_alias else self.values + 1
            sizes[id(node)] = self.values - before
            if self.values > _YAML_VALUES:
                raise LimitError(f"it has more than {_YAML_VALUES:,} values")
            return node

    sizes: dict[int, int] = {}  # id of a node -> values in it, itself included

    def plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)  # type: ignore[arg-type]

    Loader.add_multi_constructor("", plain)
    try:
        return yaml.load(text, Loader)  # noqa: S506  a subclass of the safe loader
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, OverflowError) as error:
        # all but the first: PyYAML 6.0's constructors on a text that is not of the type its tag claims (`!!bool x`)
        raise ValueError(str(error) or type(error).__name__) from None


def _entry(folder: Folder, name: str, location: StoragePlace, problems: list[Problem]) -> TorchFile | None:
    """The record of an entry; None for one that cannot be read, and a problem where it is damaged.

    Records that are missing, cut, or no archives are left to the payload rules.
    """
    path, offset, length = location
    try:
        data = _record(folder, location)
        torch_file = read_torch_bytes(data)
    except (ForeignError, LimitError):
        return None
    except UnreadableError as error:
        if folder.stat(path)[0] in READABLE and len(folder.read_range(path, offset, length)) == length:
            label = printable(path)
            sentence = f"the record of {name} in {label} {error}, byte {offset + (error.position or 0):,}"
            hint = "copy the file again from where it was written, or go back one step"
            problems.append(Problem("container", label, sentence, hint=hint, fqn=name))
        return None
    refusals = from_refusals(torch_file.unpickled, name)
    problems += [replace(problem, blocks=False) for problem in refusals if problem.kind == "unsafe"]
    return torch_file


def _record(folder: Folder, location: StoragePlace) -> bytes:
    path, offset, length = location
    if not 0 < length <= PICKLE_LIMIT or offset < 0:
        raise LimitError(f"has a record that claims {length:,} bytes at {offset:,}")
    if folder.stat(path)[0] not in READABLE:
        raise UnreadableError("cannot be read: its payload file is missing")
    return folder.read_range(path, offset, length)


def _decoded(
    source: str, read: Callable[[], TorchFile], key: str | None = None
) -> tuple[CommonState | None, list[Problem]]:
    """The common state of a file of torch.save, and what stood in the way."""
    try:
        torch_file = read()
    except UnreadableError as error:
        return None, [from_error(error, source)]
    problems = from_torch_file(torch_file, source)
    if key is not None:
        return CommonState(source, {key: torch_file.root}), problems
    value = torch_file.root[0] if isinstance(torch_file.root, list) and len(torch_file.root) == 1 else torch_file.root
    if isinstance(value, dict):
        return CommonState(source, value), problems
    if not problems:
        problems.append(from_error(UnreadableError("holds no dict of common values"), source))
    return None, problems
