"""Code in a folder that runs in the process that loads the model: named here, never run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from ckptlint.errors import CkptlintError, LimitError
from ckptlint.formats.strict_json import why_no_json
from ckptlint.loaders.json_file import read_json
from ckptlint.model import Problem
from ckptlint.model.text import first_names, human_bytes, join_words, plural, printable
from ckptlint.patterns import lazy_pattern
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import Folder

_LIMIT = 2**26  # bytes of all files together
_LEAST = {True: 2**16, False: 2**20}  # as which the smallest file counts, near and over a network
_SMALL = 2**20  # bytes up to which files of other names are looked at, on a local disk
_LOOKED_AT = lazy_pattern(
    r".*config\.json|(modules|chat_template|special_tokens_map|added_tokens)\.json|.*\.(jinja2?|ya?ml)"
)
_LIBRARIES = (
    "sentence_transformers.", "transformers.", "diffusers.", "peft.", "timm.", "torch.", "__main__.", "torchvision.",
    "torchmetrics.", "lightning.", "pytorch_lightning.", "nemo.", "megatron.", "verl.",
)  # fmt: skip
_TOKENIZER = "tokenizer_config.json"
_OLDER = ("special_tokens_map.json", "added_tokens.json")  # read where that one does not list the added tokens
_LOADED = (_TOKENIZER, *_OLDER, "preprocessor_config.json", "processor_config.json", "chat_template.json")
_TEMPLATE = lazy_pattern(r"__\w+__")  # what a template needs to leave its sandbox, and no healthy one has
_SPELLS_TAG = lazy_pattern(r"python/|%TAG|%[0-9a-fA-F]{2}")  # no text spells that tag without one of these
_SPELLS_TARGET = lazy_pattern(r"_target_|\\[xuU\r\n]")  # nor hydra's key


class _Searched(NamedTuple):
    """What was found in settings: path -> what names code there, path -> why a load stops, paths of those not read."""

    code: dict[str, str]
    damaged: dict[str, str]
    unread: list[str]


def code_beside(files: Sequence[tuple[Folder, str, str]], reported: Collection[str]) -> list[Problem]:
    """Notes of the modules, settings and templates through which loading may run code, and of those not read.

    Settings that transformers reads and that are damaged are unread. Of each file of a step come the folder, the name
    there and the printable path from the checkpoint; `reported` are the paths that other problems call damaged.

    Source: transformers 5.23, dynamic_module_utils.py (`auto_map`, with `trust_remote_code`),
    tokenization_utils_base.py (which files a tokenizer reads); PyYAML 6, `!!python/` tags of `yaml.unsafe_load`;
    sentence-transformers, `import_from_string` of `type` in modules.json; peft/auto.py, `import_module` of
    `parent_library` in adapter_config.json; hydra 1.3, `instantiate`, which calls `_target_`
    """
    settings = [item for item in files if _LOOKED_AT.fullmatch(item[1]) and item[0].has(item[1])]
    settings += islice((item for item in files if _is_small(*item)), _LIMIT // _LEAST[True])
    try:
        size = min(sum(folder.size(name) for folder, name, _ in settings), _LIMIT)
        searched = isolated(partial(_searched, settings), size) if settings else _Searched({}, {}, [])
    except LimitError:
        searched = _Searched({}, {}, [label for _, name, label in settings if _LOOKED_AT.fullmatch(name)])
    problems = []
    if searched.code:
        modules = [label for _, _, label in files if label.endswith(".py") and "/" not in label]
        settings_with_code = [f"{label} ({what})" for label, what in searched.code.items()]
        sentence = f"this folder contains code: {join_words(settings_with_code + modules)}"
        why = "it runs where the model is loaded with trust_remote_code, yaml.unsafe_load or an unsandboxed template"
        problems.append(Problem("note", next(iter(searched.code)), sentence, why=why))
    for label, error in searched.damaged.items():
        if label not in reported:
            why = "a load of the tokenizer or of the processor stops at it"
            problems.append(Problem("unread", label, f"{label} {error}", why=why))
    if unread := [label for label in searched.unread if label not in reported]:
        sentence = f"{plural(len(unread), 'file')} of settings could not be searched for code: {first_names(unread)}"
        problems.append(Problem("note", unread[0], sentence))
    return problems


def _is_small(folder: Folder, name: str, _: str) -> bool:
    """Whether a file of another name is looked at: that costs a request on a store."""
    if _LOOKED_AT.fullmatch(name) or not (folder.is_near and folder.has(name)):
        return False
    try:
        return 0 < folder.size(name) <= _SMALL
    except CkptlintError:  # it is gone, and who needs it says so
        return False


def _searched(settings: Sequence[tuple[Folder, str, str]]) -> _Searched:
    """What files hold, those with a name of settings first and of them the small ones."""
    import yaml

    searched, spent = _Searched({}, {}, []), 0
    ordered = sorted(settings, key=lambda item: (not _LOOKED_AT.fullmatch(item[1]), item[0].size(item[1])))
    for folder, name, label in ordered:
        is_setting = bool(_LOOKED_AT.fullmatch(name))
        spent += max(folder.size(name), _LEAST[folder.is_near])
        try:
            data = folder.read(name, _LIMIT if spent <= _LIMIT else 0)
        except CkptlintError:
            if name in _LOADED and (size := folder.size(name)) > _LIMIT:
                searched.damaged[label] = f"has {human_bytes(size)}, more than the {human_bytes(_LIMIT)} that are read"
            elif is_setting:
                searched.unread.append(label)
            continue
        if name in _LOADED and (error := _damage(folder, name, data)):
            searched.damaged[label] = f"is damaged: {error}"
            continue
        try:
            if what := _brought(name, data):
                searched.code[label] = what
        except (yaml.YAMLError, ValueError, RecursionError):
            searched.unread.extend([label] if is_setting else [])
    return searched


def _damage(folder: Folder, name: str, data: bytes) -> str:
    """Why transformers stops at a file that holds this; "" where it does not."""
    try:
        if isinstance(json.loads(data.decode()), dict):
            return ""
        error = "it holds no JSON object"
    except (ValueError, RecursionError) as reason:
        error = f"it {why_no_json(reason)}"
    is_replaced = name in _OLDER and "added_tokens_decoder" in read_json(folder, _TOKENIZER, _LIMIT)[0]
    return "" if is_replaced else error


def _brought(name: str, data: bytes) -> str:
    """What in a file names code, "" for nothing; raises YAMLError, ValueError or RecursionError for what is damaged."""
    if name.endswith((".jinja", ".jinja2")):
        return _names(data.decode("utf-8", "replace"))
    text = data.decode(json.detect_encoding(data), "replace")
    if not name.endswith(".json"):
        return _in_yaml(text)
    if not _LOOKED_AT.fullmatch(name) and not _SPELLS_TARGET.search(text):
        return ""
    document: Any = json.loads(text)
    if name == "modules.json" and isinstance(document, list):
        return _imports("type", document)
    if what := _imports("_target_", _objects_in(document)):
        return what
    if not isinstance(document, dict) or not _LOOKED_AT.fullmatch(name):
        return ""
    if what := _imports("parent_library", [document.get("auto_mapping")]):
        return what
    return "auto_map" if document.get("auto_map") else _names(json.dumps(document.get("chat_template", "")))


def _in_yaml(text: str) -> str:
    """The same of YAML, whose events construct nothing."""
    import yaml

    if not (("!" in text and _SPELLS_TAG.search(text)) or _SPELLS_TARGET.search(text)):
        return ""
    target, key = "", ""
    for event in yaml.parse(text, yaml.SafeLoader):
        if (getattr(event, "tag", None) or "").startswith("tag:yaml.org,2002:python/"):
            return "a tag !!python/"
        value = event.value if isinstance(event, yaml.ScalarEvent) else ""
        target = target or (_imports(key, [{key: value}]) if key == "_target_" else "")
        key = value
    return target


def _objects_in(document: Any) -> Iterator[Any]:
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _names(template: str) -> str:
    return f"a template with {match[0]}" if (match := _TEMPLATE.search(template)) else ""


def _imports(key: str, entries: Iterable[Any]) -> str:
    """The module outside the known libraries that an entry has a library import, "" for none."""
    named = (entry.get(key) for entry in entries if isinstance(entry, dict))
    modules = (name for name in named if isinstance(name, str) and name and not f"{name}.".startswith(_LIBRARIES))
    # hydra reads names with a dot; what stands for another field says nothing
    modules = (name for name in modules if key != "_target_" or ("." in name and not name.startswith("${")))
    return f"{key} {printable(name)}" if (name := next(modules, "")) else ""
