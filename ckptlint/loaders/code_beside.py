"""Code in a folder that runs in the process that loads the model: named here, never run."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ckptlint.errors import CkptlintError, LimitError
from ckptlint.model import Problem
from ckptlint.model.text import first_names, join_words, plural, printable
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import Folder

_LIMIT = 2**26  # bytes of all files together
_LEAST = {True: 2**16, False: 2**20}  # as which the smallest file counts, near and over a network
_LOOKED_AT = re.compile(r".*config\.json|modules\.json|chat_template\.json|.*\.(jinja2?|ya?ml)")
_LIBRARIES = ("sentence_transformers.", "transformers.", "diffusers.", "peft.", "timm.", "torch.", "__main__.")
_TEMPLATE = re.compile(r"__\w+__")  # what a template needs to leave its sandbox, and no healthy one has
_SPELLS_TAG = re.compile(r"python/|%TAG|%[0-9a-fA-F]{2}")  # no text spells that tag without one of these


def code_beside(files: Sequence[tuple[Folder, str, str]], reported: Collection[str]) -> list[Problem]:
    """Notes of the modules, settings and templates through which loading may run code, and of those not read.

    Args:
        files: the folder, the name there and the printable path from the checkpoint of each file of a step.
        reported: paths of those that are damaged, as other problems say.

    Source:
        transformers 5.23, dynamic_module_utils.py (`auto_map`, with `trust_remote_code`); PyYAML 6, `!!python/` tags of
        `yaml.unsafe_load`; sentence-transformers, `import_from_string` of `type` in modules.json; peft/auto.py,
        `import_module` of `parent_library` in adapter_config.json
    """
    settings = [item for item in files if _LOOKED_AT.fullmatch(item[1]) and item[0].has(item[1])]
    try:
        size = min(sum(folder.size(name) for folder, name, _ in settings), _LIMIT)
        brought, unread = isolated(partial(_searched, settings), size) if settings else ({}, [])
    except LimitError:
        brought, unread = {}, [label for _, _, label in settings]
    problems = []
    if brought:
        modules = [label for _, _, label in files if label.endswith(".py") and "/" not in label]
        settings_with_code = [f"{label} ({what})" for label, what in brought.items()]
        sentence = f"this folder contains code: {join_words(settings_with_code + modules)}"
        why = "it runs where the model is loaded with trust_remote_code, yaml.unsafe_load or an unsandboxed template"
        problems.append(Problem("note", next(iter(brought)), sentence, why=why))
    if unread := [label for label in unread if label not in reported]:
        sentence = f"{plural(len(unread), 'file')} of settings could not be searched for code: {first_names(unread)}"
        problems.append(Problem("note", unread[0], sentence))
    return problems


def _searched(settings: Sequence[tuple[Folder, str, str]]) -> tuple[dict[str, str], list[str]]:
    """Path -> what names code there; and the paths of the files that are not read, the large ones first of all."""
    import yaml

    brought, unread, spent = dict[str, str](), list[str](), 0
    for folder, name, label in sorted(settings, key=lambda item: item[0].size(item[1])):
        spent += max(folder.size(name), _LEAST[folder.is_near])
        try:
            if what := _brought(name, folder.read(name, _LIMIT if spent <= _LIMIT else 0)):
                brought[label] = what
        except (CkptlintError, yaml.YAMLError, ValueError):
            unread.append(label)
    return brought, unread


def _brought(name: str, data: bytes) -> str:
    """What in a file names code, "" for nothing; errors of `yaml` for what is none, whose events construct nothing."""
    import yaml

    if name.endswith((".yaml", ".yml")):
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
        events = yaml.parse(data, yaml.SafeLoader) if "!" in text and _SPELLS_TAG.search(text) else ()
        tags = (getattr(event, "tag", None) or "" for event in events)
        return "a tag !!python/" if any(tag.startswith("tag:yaml.org,2002:python/") for tag in tags) else ""
    if not name.endswith(".json"):
        return _names(data.decode("utf-8", "replace"))
    document: Any = None
    with suppress(ValueError, RecursionError):
        document = json.loads(data)
    if name == "modules.json" and isinstance(document, list):
        return _imports("type", document)
    if not isinstance(document, dict):
        return ""
    if what := _imports("parent_library", [document.get("auto_mapping")]):
        return what
    return "auto_map" if document.get("auto_map") else _names(json.dumps(document.get("chat_template", "")))


def _names(template: str) -> str:
    return f"a template with {match[0]}" if (match := _TEMPLATE.search(template)) else ""


def _imports(key: str, entries: list[Any]) -> str:
    """The module outside the known libraries that an entry has a library import, "" for none."""
    named = [entry.get(key) for entry in entries if isinstance(entry, dict)]
    other = (name for name in named if isinstance(name, str) and name and not f"{name}.".startswith(_LIBRARIES))
    return f"{key} {printable(name)}" if (name := next(other, "")) else ""
