"""The tensors of a model as transformers builds it, where no table knows its type and transformers is installed.

In a process of its own, on the meta device, which holds no data; without a network, and without a line of code from
anywhere but the installed packages.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ckptlint.architecture.expected import NoTable
from ckptlint.architecture.huggingface import declared_quantisation
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern

SECONDS = 60
"""Processor time that building a model may take."""

WAIT = 300
"""Seconds after which nobody waits for it any more."""

MEMORY = 4 << 30
"""Bytes that it may ask for."""

_ERROR = lazy_pattern(r"[\w.]*(Error|Exception|Interrupt)\b")
_MOST_MODULES = 2_000  # layers or experts
_COUNTS = ("layer", "expert", "depth", "blocks")
_NEVER = ("auto_map", "custom_pipelines")  # what names code; attention may name kernels of a hub as well


def built_model(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Key -> shape, as save_pretrained of the installed transformers would write them, tied copies left out.

    Raises:
        NoTable: transformers is not installed, does not know the model, or cannot build it from this configuration;
            the reason as the end of a sentence.
    """
    if _has(config, lambda name, value: name in _NEVER and bool(value)):
        raise NoTable("and it names custom code (auto_map), which ckptlint never runs")
    if declared_quantisation(config):
        raise NoTable("and it declares a quantisation, which renames or reshapes tensors")
    if not config.get("architectures"):
        raise NoTable("and it names no class in `architectures` that transformers could build")
    if _has(config, lambda name, value: any(word in name for word in _COUNTS) and _is_huge(value)):
        raise NoTable(f"and it asks for more than {_MOST_MODULES:,} layers or experts")
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        why = "is not installed here (`pip install torch transformers`)"
        raise NoTable(f"and transformers, which could build it, {why}")
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ckptlint.architecture.built"],
            input=json.dumps([SECONDS, MEMORY, config]),
            env=os.environ | quiet | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoTable(f"and transformers did not build it within {WAIT} s") from None
    if done.returncode < 0:
        limits = f"{SECONDS} s of processor time, {MEMORY >> 30} GiB"
        raise NoTable(f"and transformers was stopped while it built it (signal {-done.returncode}; limits {limits})")
    try:
        answer = json.loads(done.stdout.rpartition("\n")[2])
        return {str(key): tuple(map(int, shape)) for key, shape in answer.items()}
    except (ValueError, TypeError, AttributeError):
        errors = [line for line in done.stderr.splitlines() if _ERROR.match(line)]
        last = printable(errors[-1].strip())[:160] if errors else ""
        raise NoTable(f"and the installed transformers cannot build it{f' ({last})' if last else ''}") from None


def _has(config: object, is_wanted: Callable[[str, object], bool], depth: int = 0) -> bool:
    """Whether a configuration or a section of it has such a field."""
    if not isinstance(config, dict) or depth > 5:
        return False
    return any(is_wanted(name, value) or _has(value, is_wanted, depth + 1) for name, value in config.items())


def _is_huge(value: object) -> bool:
    """Whether a field asks for more modules than any model has."""
    values = value if isinstance(value, list) else [value]
    numbers = (item for item in values if isinstance(item, (int, float)))
    return len(values) > _MOST_MODULES or any(number > _MOST_MODULES for number in numbers)


def _build(config: dict[str, Any]) -> dict[str, list[int]]:
    """Key -> shape as `save_pretrained` of the declared class would write it, built without memory."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    name = config["architectures"][0]
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"it has no class {str(name)[:80]}")
    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(f"it has no model_type {str(config.get('model_type'))[:80]}")
    build: Any = kind
    declared = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(_plain(config))
    with torch.device("meta"):
        model = build._from_config(declared, attn_implementation="eager")
    tied = set(model.all_tied_weights_keys)
    state = {key: value for key, value in model.state_dict().items() if key not in tied}
    saved = revert_weight_conversion(model, state)
    return {key: list(value.shape) for key, value in saved.items()}


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without fields that choose how to compute: kernels may be code of a hub."""
    fields = {name: value for name, value in config.items() if not name.endswith("_implementation")}
    return {name: _plain(value) if isinstance(value, dict) else value for name, value in fields.items()}


def _limit(seconds: int, memory: int) -> None:
    """Bounds what a hostile configuration can take: memory and processor time."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


if __name__ == "__main__":
    *limits, asked = json.load(sys.stdin)
    _limit(*limits)
    print("\n" + json.dumps(_build(asked)), end="")  # noqa: T201  the answer to the parent
