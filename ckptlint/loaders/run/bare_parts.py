"""Folders that hold the configuration of a model and no weights, in a pipeline or among the models of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ckptlint.errors import CkptlintError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.run.steps import sub_folder
from ckptlint.model.text import join_words, printable, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import holds_no_state, step_number, world
from ckptlint.vocabulary.litter import is_system_file

CONFIG = "config.json"
_PIPELINE = "model_index.json"
_CONFIG_LIMIT = 4 * 1024**2
_LEVELS = 3  # folders below a part that may hold its weights
_TEXT = lazy_pattern(r".+(?<!\.index)\.(json|md|txt|ya?ml|py)")  # an index without its files is reported elsewhere
_NO_MODEL = lazy_pattern(r".*(Processor|Pachifier|Callback)")  # the other classes of diffusers that write a config.json


class BarePart(NamedTuple):
    """A folder with a model's configuration and no weights: printable name, class, what says that weights belong."""

    name: str
    model: str
    named_by: str


def bare_parts(folder: Folder) -> Iterator[BarePart]:
    """The sub-folders that hold the configuration of a model and no weights, while models beside them hold theirs.

    A configuration of transformers may lie alone: beside a tokenizer, in a folder that frameworks make for it, for a
    frozen tower. So a pipeline must name it, or it is in a step and of diffusers, which saves both at once. The cache
    of huggingface_hub holds what was asked for so far.

    Source: diffusers 0.39 ModelMixin, SchedulerMixin (`scheduler_config.json`), VaeImageProcessor, DiffusionPipeline
    (`model_index.json`: part -> library and class, two nulls for none); transformers 5.23 PreTrainedModel (sets
    `architectures`), ProcessorMixin (`processor_config.json`), PreTrainedTokenizerBase (`tokenizer_config.json`)
    """
    names = [name for name in folder.folders() if step_number(name) is None and not holds_no_state(name)]
    is_step = step_number(folder.name) is not None
    is_cache = folder.parent is not None and folder.parent.name == "snapshots"  # of huggingface_hub
    if not names or not (is_step or (folder.has(_PIPELINE) and not is_cache)):
        return
    subs = {name: sub for name in names if (sub := sub_folder(folder, name)) is not None and sub.has(CONFIG)}
    bare = {name: sub for name, sub in subs.items() if name not in world().models and not _may_hold_weights(sub)}
    models = {name: _models(sub) for name, sub in subs.items()} if bare else {}
    whole = [printable(name) for name, classes in models.items() if classes and name not in bare]
    pipeline = _json(folder, _PIPELINE) if whole else {}
    beside = f"{join_words(whole)} beside it {verb(len(whole), 'holds')} weights"
    for name, sub in bare.items() if whole else ():
        classes, said = models[name], pipeline.get(name)
        class_ = said[1] if isinstance(said, list) and len(said) == 2 else ""
        if classes and class_ in classes:
            yield BarePart(printable(name), printable(classes[0]), f"{_PIPELINE} names it")
        elif classes and class_ is not None and is_step and "_class_name" in _json(sub, CONFIG):
            yield BarePart(printable(name), printable(classes[0]), beside)


def _models(folder: Folder) -> list[str]:
    """The classes of the model that the configuration in a folder is of; [] where it is of none."""
    config = _json(folder, CONFIG)
    class_name, named = config.get("_class_name"), config.get("architectures")
    if isinstance(class_name, str):
        return [] if _NO_MODEL.fullmatch(class_name) else [class_name]
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _may_hold_weights(folder: Folder, levels: int = _LEVELS) -> bool:
    """Whether a folder holds anything but texts, itself or below, as far as it is looked into."""
    if any(not (_TEXT.fullmatch(name) or is_system_file(name)) for name in folder.files()):
        return True
    subs = [sub_folder(folder, name) for name in folder.folders()]
    return any(sub is None or not levels or _may_hold_weights(sub, levels - 1) for sub in subs)


def _json(folder: Folder, name: str) -> dict[str, Any]:
    """A file of JSON; {} where there is none that can be read."""
    with suppress(CkptlintError):
        return read_json(folder, name, _CONFIG_LIMIT)[0]
    return {}
