"""Code that a folder brings and that runs in whoever loads the model: named, never run."""

from __future__ import annotations

import json
import re
from typing import Any

from ckptlint.model import Problem
from ckptlint.model.text import listed, printable
from ckptlint.storage.folder import Folder

_LIMIT = 2**20  # bytes of a file that are looked at
_MOST = 64  # files
_LOOKED_AT = re.compile(r".*config\.json|chat_template\.json|.*\.(jinja2?|ya?ml)")
_TEMPLATE = re.compile(r"__\w+__")  # what a template needs to leave its sandbox, and no healthy one has


def code_beside(folder: Folder) -> list[Problem]:
    """A note of the modules, settings and templates through which loading the folder may run code that it brings.

    Source:
        transformers 5.23, dynamic_module_utils.py (`auto_map`, with `trust_remote_code`); PyYAML 6, `!!python/` tags of
        `yaml.unsafe_load`
    """
    names = [name for name in folder.files_beside() if _LOOKED_AT.fullmatch(name)][:_MOST]
    heads = zip(names, folder.heads(names, _LIMIT), strict=True)
    found = {printable(name): what for name, data in heads if data is not None and (what := _brought(name, data))}
    if not found:
        return []
    modules = [printable(name) for name in folder.files_beside() if name.endswith(".py")]
    sentence = f"this folder brings code: {listed([*(f'{name} ({what})' for name, what in found.items()), *modules])}"
    why = "it runs where the model is loaded with trust_remote_code, yaml.unsafe_load or an open template"
    return [Problem("note", next(iter(found)), sentence, why=why)]


def _brought(name: str, data: bytes) -> str:
    """What in a file names code, "" for nothing."""
    if not name.endswith(".json"):
        is_yaml = name.endswith(("yaml", "yml"))
        text = data.decode("utf-8", "replace")
        return ("a tag !!python/" if "!!python/" in text else "") if is_yaml else _names(text)
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    return "auto_map" if document.get("auto_map") else _names(json.dumps(document.get("chat_template", "")))


def _names(template: str) -> str:
    return f"a template with {match[0]}" if (match := _TEMPLATE.search(template)) else ""
