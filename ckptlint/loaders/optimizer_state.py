"""The state dict of a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptlint.model import OptimizerFile
from ckptlint.model.stored import StoredDTensor, StoredTensor

_DEPTH = 12


def optimizer_file(root: Any) -> OptimizerFile | None:
    """The state dict of an optimizer; None for what has another form."""
    states, groups = (root.get("state"), root.get("param_groups")) if isinstance(root, dict) else (None, None)
    if not isinstance(states, dict) or not isinstance(groups, list):
        return None
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return None
    params = [param for group in groups for param in group["params"]]
    if not all(isinstance(param, (int, str)) for param in (*params, *states)):
        return None
    states = {param: of_param for param, of_param in states.items() if isinstance(of_param, dict)}
    stored = (StoredTensor, StoredDTensor)
    shapes = {
        param: {str(name): value.shape for name, value in of_param.items() if isinstance(value, stored)}
        for param, of_param in states.items()
    }
    storages = {
        value.key: (str(param), str(name), value.dtype)
        for param, of_param in states.items()
        for name, value in of_param.items()
        if isinstance(value, StoredTensor) and value.offset == 0 and value.extent == value.length
    }
    settings = frozenset(str(name) for group in groups for name in group)
    return OptimizerFile(tuple(params), settings, shapes, storages=storages, groups=tuple(map(settings_of, groups)))


def settings_of(group: Mapping[Any, Any]) -> dict[Any, Any]:
    """A group without its list of parameters, which may be long: [] where it is empty, else None."""
    return {**group, "params": [] if group.get("params") == [] else None}


def param_groups_in(place: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Each group of parameters in a value as it was unpickled, with its place; arguments of a job are left out."""
    if depth > _DEPTH:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "param_groups" and isinstance(inner, list):
                groups = [group for group in inner if isinstance(group, dict)]
                yield from ((f"{place}: param_groups[{number}]", group) for number, group in enumerate(groups))
            elif name not in ("args", "state"):
                yield from param_groups_in(place, inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, (dict, list)):
                yield from param_groups_in(place, inner, depth + 1)
