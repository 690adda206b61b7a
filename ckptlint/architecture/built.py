"""The tensors of a model as transformers builds it, where no table knows its type and transformers is installed.

In a process of its own, on the meta device, which holds no data; without a network, and without a line of code from
anywhere but the installed package.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ckptlint.architecture.expected import NoTable

_SECONDS = 120
_LARGEST_ANSWER = 500_000_000
_MOST_MODULES = 2_000  # layers or experts


def built_model(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Key -> shape, as save_pretrained of the installed transformers would write them, tied copies left out.

    Raises:
        NoTable: transformers is not installed, does not know the model, or cannot build it from this configuration.
    """
    if not config.get("architectures"):
        raise NoTable("and it names no architecture that could be built")
    if _is_huge(config):
        raise NoTable(f"and it asks for more than {_MOST_MODULES:,} layers or experts")
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        raise NoTable("and transformers, which could build it, is not installed")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckptlint.architecture.built"],
            input=json.dumps(config),
            env=os.environ | offline,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoTable(f"and transformers did not build it within {_SECONDS} s") from None
    answer = done.stdout.rpartition("\n{")
    if done.returncode or len(done.stdout) > _LARGEST_ANSWER:
        raise NoTable("and the installed transformers cannot build it from this configuration")
    return {key: tuple(shape) for key, shape in json.loads("{" + answer[2]).items()}


def _build(config: dict[str, Any]) -> dict[str, list[int]]:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    for field in ("auto_map", "quantization_config", "attn_implementation", "_attn_implementation"):
        config.pop(field, None)
    name = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(name)
    build: Any = kind
    declared = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        model = build._from_config(declared, attn_implementation="eager")
    tied = set(model.all_tied_weights_keys)
    state = {key: value for key, value in model.state_dict().items() if key not in tied}
    saved = revert_weight_conversion(model, state)
    return {key: list(value.shape) for key, value in saved.items()}


def _is_huge(config: object, depth: int = 0) -> bool:
    """Whether a configuration asks for more modules than any model has."""
    if not isinstance(config, dict) or depth > 5:
        return False
    return any(
        (
            isinstance(value, int)
            and value > _MOST_MODULES
            and any(word in name for word in ("layer", "expert", "depth"))
        )
        or _is_huge(value, depth + 1)
        for name, value in config.items()
    )


def _limit() -> None:
    """Bounds what a hostile configuration can take: memory and processor time."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))


if __name__ == "__main__":
    _limit()
    print("\n" + json.dumps(_build(json.load(sys.stdin))))  # noqa: T201  the answer to the parent
