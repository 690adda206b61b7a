"""The chunk graph of one tensor as a drawing: dot, mermaid, GraphML or node-link JSON (`ckptlint graph`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

import click
import networkx as nx
import numpy as np

from ckptlint.commands.shared import ENVIRONMENT, described_or_exit, say, show_text
from ckptlint.errors import ConfigError
from ckptlint.geometry.chunk_graph import axis_graph
from ckptlint.geometry.record_states import NOT_CHECKED, STATES, chunk_states
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import JSON_ESCAPE, MARKUP_ESCAPE, inert, printable
from ckptlint.reporters.contents.checkpoint import no_tensor

_FILES = 2  # named in a label


@click.command(context_settings=ENVIRONMENT)
@click.argument("path")
@click.argument("fqn", metavar="KEY")
@click.option(
    "--dim", "axis", type=click.IntRange(min=0), metavar="N", help="Draw this dim.  [default: those that are cut]"
)
@click.option(
    "--format", "format_", type=click.Choice(["dot", "mermaid", "graphml", "json"]), default="dot", show_default=True
)
def graph(path: str, fqn: str, axis: int | None, format_: str) -> None:
    """Draw the chunks of one tensor as a graph: on each dim, which intervals they cover and where one is missing.

    Two intervals are joined where one ends and the next starts.

    Exit codes: 0 drawn, 1 unsafe or unreadable, 2 no such tensor or dim, 3 no checkpoint there, 4 not read.
    """
    checkpoints = list(described_or_exit(path, files=True, partial=True).values())
    pairs = [(ckpt, ckpt.tensors[key]) for ckpt in checkpoints for key in (fqn, printable(fqn)) if key in ckpt.tensors]
    if not pairs:
        raise ConfigError(no_tensor(checkpoints, fqn))
    drawn = drawing(*pairs[0], axis)
    show_text(inert(GRAPH_FORMATS[format_](drawn), JSON_ESCAPE if format_ == "json" else MARKUP_ESCAPE))
    if axis is None and (chain := _chain(drawn)):
        say(chain)


def _chain(graph: nx.DiGraph[str]) -> str:
    """The sentence for a graph that has nothing to show but intervals one after another; "" for any other."""
    axes = {data["axis"] for _, data in graph.nodes(data=True)}
    if len(axes) != 1 or any(degree > 1 for _, degree in graph.out_degree):
        return ""
    count = sum("start" in data for _, data in graph.nodes(data=True))
    if count == 1:
        return f"{graph.graph['fqn']} is not cut: its graph is one interval"
    return f"{graph.graph['fqn']} is cut on dim {axes.pop()} alone: its graph is a chain of {count:,} intervals"


def drawing(ckpt: Checkpoint, tensor: Tensor, axis: int | None) -> nx.DiGraph[str]:
    """The chunk graphs of the axes that are cut, or of one axis, in one graph.

    Node attributes: `axis`; `start` and `stop` in elements; `chunks`, how many lie on the interval; `files`, the names
    of their files; `lost`, how many are lost and how ("1 missing", or "missing"), "" for none; a node with `edge`
    alone is an end of the axis that no chunk reaches. The attribute `missing` of a link is the interval [start, stop)
    that no chunk occupies. Graph attributes: `fqn`, `dtype`, `shape` and for each axis its label.

    Raises:
        ConfigError: there is no such axis, or chunks and shape cannot be compared.
    """
    if not tensor.is_sound:
        raise ConfigError(f"the chunks of {tensor.fqn} do not fit its shape: run `ckptlint {ckpt.path}`")
    rank = len(tensor.global_shape)
    if axis is not None and not 0 <= axis < rank:
        axes = "no dims" if not rank else f"the dims 0 to {rank - 1}" if rank > 1 else "only dim 0"
        raise ConfigError(f"{tensor.fqn} has no dim {axis}: its shape {list(tensor.global_shape)} has {axes}")
    intervals = [tensor.tiling.intervals(a).tolist() for a in range(rank)]
    cut = [a for a in range(rank) if len(intervals[a]) > 1 or _gaps(intervals[a], tensor.global_shape[a])]
    graph: nx.DiGraph[str] = nx.DiGraph(fqn=tensor.fqn, dtype=tensor.dtype, shape=str(list(tensor.global_shape)))
    for a in [axis] if axis is not None else cut or list(range(min(rank, 1))):
        _add_axis(graph, ckpt, tensor, a)
    return graph


def _gaps(intervals: list[list[int]], size: int) -> list[tuple[int, int]]:
    """The parts [start, stop) of an axis that no interval occupies; intervals come by start."""
    gaps, reached = [], 0
    for start, stop in [*intervals, [size, size]]:
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    return gaps


def _add_axis(graph: nx.DiGraph[str], ckpt: Checkpoint, tensor: Tensor, axis: int) -> None:
    """Add a node for each interval of an axis, and for each gap between them, and the edges from one to the next."""
    intervals, states = axis_graph(tensor.tiling, axis), chunk_states(ckpt, tensor)
    nodes = sorted(intervals)
    graph.graph[f"dim {axis}"] = f"dim {axis} x {len(nodes)}"
    names = {node: f"{axis}:{node[0]}:{node[1]}" for node in nodes}
    for start, stop in nodes:
        rows = intervals.nodes[start, stop]["rows"]
        files = _files(ckpt, tensor, rows)
        counts = np.bincount(states[rows], minlength=len(STATES)).tolist()
        bad = [i for i in range(NOT_CHECKED + 1, len(STATES)) if counts[i]]
        lost = ", ".join(f"{counts[i]} {STATES[i]}" if len(rows) > 1 else STATES[i] for i in bad)
        graph.add_node(names[start, stop], axis=axis, start=start, stop=stop, chunks=len(rows), files=files, lost=lost)
    graph.add_edges_from((names[a], names[b]) for a, b in sorted(intervals.edges))
    ends = {stop: names[start, stop] for start, stop in reversed(nodes)}
    starts = {start: names[start, stop] for start, stop in reversed(nodes)}
    for low, high in _gaps([list(node) for node in nodes], tensor.global_shape[axis]):
        before, after = ends.get(low, f"{axis}:{low}"), starts.get(high, f"{axis}:{high}")
        for name, at in ((before, low), (after, high)):
            if name not in graph:
                graph.add_node(name, axis=axis, edge=at)
        graph.add_edge(before, after, missing=f"{low}:{high}")


def _files(ckpt: Checkpoint, tensor: Tensor, rows: list[int]) -> list[str]:
    records = tensor.chunks.record[np.array(rows)]
    numbers = dict.fromkeys(ckpt.records.file[records[records >= 0]].tolist())
    return [ckpt.files[number].name for number in numbers]


def as_mermaid(graph: nx.DiGraph[str]) -> str:
    """A flowchart that GitHub, GitLab and most notebooks draw."""
    axes = list(dict.fromkeys(data["axis"] for _, data in graph.nodes(data=True)))
    lines, indent = ["graph LR"], "  " if len(axes) == 1 else "    "
    letters = {name: _letters(number) for number, name in enumerate(graph)}
    for axis in axes:
        if len(axes) > 1:
            lines.append(f'  subgraph dim{axis} ["{_for_mermaid(graph.graph[f"dim {axis}"])}"]')
        of_axis = [name for name in graph if graph.nodes[name]["axis"] == axis]
        drawn: set[str] = set()

        def node(name: str, drawn: set[str] = drawn) -> str:
            """The letter of a node, with its label where it appears first."""
            if name in drawn:
                return letters[name]
            drawn.add(name)
            label = "<br/>".join(map(_for_mermaid, _label(graph.nodes[name])))
            return f'{letters[name]}(("{label}"))' if "edge" in graph.nodes[name] else f'{letters[name]}["{label}"]'

        for a, b, data in graph.edges(of_axis, data=True):
            link = f'-. "{data["missing"]} missing" .->' if "missing" in data else "-->"
            lines.append(f"{indent}{node(a)} {link} {node(b)}")
        lines += [f"{indent}{node(name)}" for name in of_axis if name not in drawn]
        if len(axes) > 1:
            lines.append("  end")
    return "\n".join(lines) + "\n"


def as_dot(graph: nx.DiGraph[str]) -> str:
    """The language of Graphviz."""
    lines = [f"digraph {_for_dot([graph.graph['fqn']])} {{", "  rankdir=LR;", "  node [shape=box];"]
    for axis in dict.fromkeys(data["axis"] for _, data in graph.nodes(data=True)):
        lines += [f"  subgraph cluster_{axis} {{", f"    label={_for_dot([graph.graph[f'dim {axis}']])};"]
        for name, data in graph.nodes(data=True):
            if data["axis"] == axis:
                shape = ", shape=circle" if "edge" in data else ""
                lines.append(f"    {_for_dot([name])} [label={_for_dot(_label(data))}{shape}];")
        lines.append("  }")
    for a, b, data in graph.edges(data=True):
        style = f" [style=dashed, label={_for_dot([data['missing'] + ' missing'])}]" if "missing" in data else ""
        lines.append(f"  {_for_dot([a])} -> {_for_dot([b])}{style};")
    return "\n".join([*lines, "}"]) + "\n"


def as_graphml(graph: nx.DiGraph[str]) -> str:
    """XML as networkx writes it; the file names of a node are one text, a name a line."""
    plain = graph.copy()
    for _, data in plain.nodes(data=True):
        if "files" in data:
            data["files"] = "\n".join(data["files"])
    return '<?xml version="1.0" encoding="utf-8"?>\n' + "\n".join(nx.generate_graphml(plain)) + "\n"


def as_json(graph: nx.DiGraph[str]) -> str:
    """Node-link data as `networkx.node_link_graph(..., edges="edges")` reads it back."""
    # written by hand: networkx 3.2 to 3.6 call the list of edges by two names
    document: dict[str, Any] = {
        "directed": True,
        "multigraph": False,
        "graph": graph.graph,
        "nodes": [{**data, "id": name} for name, data in graph.nodes(data=True)],
        "edges": [{**data, "source": a, "target": b} for a, b, data in graph.edges(data=True)],
    }
    return json.dumps(document, indent=2) + "\n"


GRAPH_FORMATS: dict[str, Callable[[nx.DiGraph[str]], str]] = {
    "dot": as_dot,
    "mermaid": as_mermaid,
    "graphml": as_graphml,
    "json": as_json,
}


def _label(data: dict[str, Any]) -> list[str]:
    """The lines in a node: its interval and its files."""
    if "edge" in data:
        return [str(data["edge"])]
    files = [PurePath(name).stem for name in data["files"]]
    more = f" +{len(files) - _FILES:,}" if len(files) > _FILES else ""
    fields = [f"{data['start']}:{data['stop']}", ", ".join(files[:_FILES]) + more or "stored nowhere"]
    return [*fields, data["lost"]] if data["lost"] else fields


def _letters(number: int) -> str:
    """a to z, then aa, ab, ...; a prefix keeps words of the language apart (`end` ends a subgraph)."""
    text = ""
    while True:
        number, rest = divmod(number, 26)
        text = chr(ord("a") + rest) + text
        if not number:
            return text if len(text) == 1 else f"n_{text}"
        number -= 1


def _for_mermaid(text: str) -> str:
    """Everything of ASCII that may mean something to mermaid or to HTML as its entity code.

    >>> _for_mermaid('a"<b>.w')
    'a#34;#60;b#62;.w'
    """
    return re.sub(r"[^\w .,:+()-]", lambda match: f"#{ord(match[0])};", text)


def _for_dot(lines: Iterable[str]) -> str:
    r"""A quoted string of Graphviz, one line of text each.

    >>> _for_dot(['a"b', 'c\\l'])
    '"a\\"b\\nc\\\\l"'
    """
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'
