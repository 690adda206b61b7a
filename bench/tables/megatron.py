"""Makes ckptlint/architecture/megatron.json: what megatron-core names its tensors, and how large they are.

    python bench/tables/megatron.py probe --core 0.16.1=FOLDER ... --probes 100 --out PROBES  # pip install --target ...
    python bench/tables/megatron.py fit PROBES

`probe` runs megatron_probes.py once for each version. `fit` takes every fifth set of arguments away, finds for every
tensor which of the sizes and conditions below agree with all the others, and refuses to write a table that does not say
exactly what megatron-core said about those that were taken away. The values of the fields are those that ckptlint
itself reads from arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptlint.architecture import megatron
from ckptlint.architecture.expected import NoTable
from ckptlint.architecture.expressions import ExpressionError, parse_expression
from ckptlint.architecture.tables import TableRow, expand

TABLE = Path(megatron.__file__).with_name(megatron.TABLE_FILE)

RANGES = {"layer": "num_layers", "mtp": "mtp_num_layers", "expert": "num_experts"}

_GATED = "(1 + swiglu) * "
_QUERIES = "(2 * num_attention_heads if attention_output_gate else num_attention_heads)"
_QKV = f"({_QUERIES} + 2 * num_query_groups) * kv_channels"
_MAMBA = "(mamba_num_heads * mamba_head_dim if mamba_num_heads else 2 * hidden_size)"

SIZES = [
    "hidden_size",
    "padded_vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_layers",
    "1",
    "4",
    "2 * hidden_size",
    "kv_channels",
    "num_attention_heads * kv_channels",
    "num_query_groups * kv_channels",
    "(num_attention_heads + 2 * num_query_groups) * kv_channels",
    _QKV,
    "ffn_hidden_size",
    f"{_GATED}ffn_hidden_size",
    "moe_ffn_hidden_size",
    f"{_GATED}moe_ffn_hidden_size",
    "num_experts * moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    f"{_GATED}moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "(moe_latent_size if moe_latent_size else hidden_size)",
    "num_attention_heads * v_head_dim",
    "num_attention_heads * (v_head_dim if multi_latent_attention else kv_channels)",
    "num_attention_heads * (qk_head_dim + v_head_dim)",
    "num_attention_heads * (qk_head_dim + qk_pos_emb_head_dim)",
    "kv_lora_rank",
    "kv_lora_rank + qk_pos_emb_head_dim",
    "q_lora_rank",
    _MAMBA,
    "(mamba_num_heads if mamba_num_heads else 2 * hidden_size // mamba_head_dim)",
    "mamba_num_groups * mamba_state_dim",
]
"""What sizes may be; of those that agree with all probes the first is taken."""

FLAGS = [
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "normalization == 'RMSNorm'",
    "untie_embeddings_and_output_weights",
    "qk_layernorm",
    "position_embedding_type == 'learned_absolute'",
    "multi_latent_attention",
    "q_lora_rank",
    "mtp_num_layers",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_enable_expert_bias",
    "moe_latent_size",
    "moe_grouped_gemm",
]
IN_LAYER = {
    "gpt": ["moe_layer_freq[layer]"],
    "hybrid": [f"hybrid_layer_pattern[layer] == '{symbol}'" for symbol in "M*-E"],
}
ANYWHERE = {"gpt": ["num_experts", "moe_layer_freq[num_layers - 1]"], "hybrid": []}
"""What may decide whether a tensor exists."""

Unit = tuple[int, int]
"""A probe and a layer of it, -1 for a tensor outside of layers."""


def probe(cores: Mapping[str, str], count: int, out: Path) -> None:
    """Run every version, a process each."""
    out.mkdir(exist_ok=True)
    for version, folder in cores.items():
        script = Path(__file__).with_name("megatron_probes.py")
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(script), str(out / f"{version}.json"), "--probes", str(count)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


# ---------------------------------------------------------------- one form of one version


def pattern(key: str) -> tuple[str, int]:
    """The name with indices in braces, and the layer or -1."""
    layer = -1
    if match := re.match(r"decoder\.layers\.(\d+)\.", key):
        layer = int(match[1])
        key = f"decoder.layers.{{layer}}.{key[match.end() :]}"
    key = re.sub(r"^mtp\.layers\.\d+\.", "mtp.layers.{mtp}.", key)
    return re.sub(r"experts\.\d+\.", "experts.{expert}.", key), layer


class Contradiction(Exception):  # noqa: N818
    """Raised where probes agree with no size or condition."""


class Form:
    """What several probes of one version, implementation and naming have in common."""

    def __init__(self, kind: str, probes: list[dict[str, Any]]) -> None:
        self.kind, self.probes = kind, probes
        self.values = [megatron.fields(one["args"]) for one in probes]
        self.found: dict[str, dict[Unit, tuple[int, ...]]] = defaultdict(dict)
        for number, one in enumerate(probes):
            for key, shape in one["shapes"].items():
                name, layer = pattern(key)
                known = self.found[name].setdefault((number, layer), tuple(shape))
                if known != tuple(shape):
                    raise Contradiction(f"{key}: {known} and {shape}")

    def rows(self) -> list[TableRow]:
        """A row for every name."""
        rows: dict[str, TableRow] = {}
        for name, units in sorted(self.found.items(), key=lambda item: item[0].replace("bias", "~")):
            twin = self._twin(name, rows)
            rows[name] = TableRow(name, self._dims(name, units, twin), self._exists(name, units, twin))
        return list(rows.values())

    def _twin(self, name: str, rows: Mapping[str, TableRow]) -> TableRow | None:
        """The row that a tensor most likely has, by what it stands beside; it counts where the probes allow for it.

        A layer for multi-token prediction is built as the last layer of the decoder; a LayerNorm has a bias beside its
        weight, and so have the linear layers where all of them do.
        """
        if "bias" in name and (row := rows.get(re.sub(r"bias(?=(_[wv])?$)", "weight", name))):
            is_norm = "norm" in name
            flag = "normalization != 'RMSNorm'" if is_norm else "add_bias_linear"
            exists = " or ".join(f"{part} and {flag}" if part else flag for part in row.exists.split(" or "))
            return TableRow(name, row.dims if is_norm else row.dims[:-1], exists)
        inner = re.match(r"mtp\.layers\.\{mtp\}\.(?:transformer_layer|mtp_model_layer)\.(.+)", name)
        if inner is None:
            return None
        if row := rows.get(f"decoder.layers.{{layer}}.{inner[1]}"):
            return TableRow(name, row.dims, row.exists.replace("[layer]", "[num_layers - 1]"))
        row = rows.get(f"decoder.layers.{inner[1]}")
        return TableRow(name, row.dims[1:], row.exists) if row else None

    def _at(self, unit: Unit) -> dict[str, object]:
        return {**self.values[unit[0]], "layer": unit[1]}

    def _dims(self, name: str, units: dict[Unit, tuple[int, ...]], twin: TableRow | None) -> tuple[str, ...]:
        if twin and all(shape == tuple(_value(d, self._at(u)) for d in twin.dims) for u, shape in units.items()):
            return twin.dims
        ranks = {len(shape) for shape in units.values()}
        if len(ranks) > 1:
            raise Contradiction(f"{ranks} dims")
        (axes,) = ranks
        return tuple(self._size(name, {unit: shape[axis] for unit, shape in units.items()}) for axis in range(axes))

    def _size(self, name: str, sizes: dict[Unit, int]) -> str:
        for text in SIZES:
            if all(_value(text, self._at(unit)) == size for unit, size in sizes.items()):
                return text
        shown = []
        for text in SIZES:
            wrong = [unit for unit, size in sizes.items() if _value(text, self._at(unit)) != size]
            shown.append((len(wrong), text, wrong[0], sizes[wrong[0]]))
        count, text, unit, size = min(shown)
        args = self.probes[unit[0]]["args"]
        raise Contradiction(f"{name} has no size; {text} is not {size} in {count} of {len(sizes)}: {args}")

    def _exists(self, name: str, units: dict[Unit, tuple[int, ...]], twin: TableRow | None) -> str:
        if "{layer}" in name:
            every = [(n, layer) for n, v in enumerate(self.values) for layer in range(int(str(v["num_layers"])))]
            flags = FLAGS + IN_LAYER[self.kind]
        else:
            every = [(n, -1) for n in range(len(self.values))]
            flags = FLAGS + ANYWHERE[self.kind]
        if "{mtp}" in name:
            every = [unit for unit in every if self.values[unit[0]]["mtp_num_layers"]]
        if "{expert}" in name:
            every = [unit for unit in every if self.values[unit[0]]["num_experts"]]
        if twin and all(
            (not twin.exists or bool(_value(twin.exists, self._at(unit)))) is (unit in units) for unit in every
        ):
            return twin.exists
        truth = {unit: tuple(bool(_value(flag, self._at(unit))) for flag in flags) for unit in every}
        yes = {truth[unit] for unit in units}
        no = {truth[unit] for unit in every if unit not in units}
        if both := yes & no:
            raise Contradiction(f"{name} depends on something else: {dict(zip(flags, next(iter(both)), strict=True))}")
        words = set(re.split(r"[^a-z]+", name.lower()))
        rank = [len(words & set(re.split(r"[^a-z]+", flag.lower()))) for flag in flags]
        return " or ".join(_spelled(term, flags) for term in _terms(yes, no, rank))


def _value(text: str, values: Mapping[str, object]) -> object:
    try:
        return parse_expression(text).value(values)
    except ExpressionError:
        return None


Term = tuple[tuple[int, bool], ...]


def _terms(yes: set[tuple[bool, ...]], no: set[tuple[bool, ...]], rank: list[int]) -> list[Term]:
    """The fewest conjunctions that hold for all of the first and none of the second, each as short as it can be.

    Args:
        rank: how well each flag goes with the tensor's name; of two that would do, the better one stays.
    """
    if term := _term(yes, no, rank):
        return [] if term == ((-1, True),) else [term]
    best: list[Term] | None = None
    for flag in range(len(rank)):
        halves = [{one for one in yes if one[flag] is value} for value in (True, False)]
        terms = [_term(half, no, rank) for half in halves] if all(halves) else [()]
        if all(terms) and (best is None or sum(map(len, terms)) < sum(map(len, best))):
            best = terms
    if best is None:
        raise Contradiction("no condition of two parts")
    return best


def _term(yes: set[tuple[bool, ...]], no: set[tuple[bool, ...]], rank: list[int]) -> Term:
    """() where none holds; ((-1, True),) where nothing is asked for."""
    literals = [(flag, value) for flag in range(len(rank)) for value in (True, False)]
    common = [(flag, value) for flag, value in literals if all(one[flag] is value for one in yes)]

    def admits(term: list[tuple[int, bool]]) -> bool:
        return any(all(one[flag] is value for flag, value in term) for one in no)

    if admits(common):
        return ()
    for literal in sorted(common, key=lambda item: (item[1], rank[item[0]], -item[0])):  # "not" goes first
        without = [other for other in common if other != literal]
        if not admits(without):
            common = without
    return tuple(common) or ((-1, True),)


def _spelled(term: Term, flags: list[str]) -> str:
    words = []
    for flag, value in sorted(term, key=lambda item: -item[0]):  # the layer's own condition first
        text = flags[flag]
        turned = text.replace("==", "!=") if "==" in text else f"not {text}"
        words.append(text if value else turned)
    return " and ".join(words)


# ---------------------------------------------------------------- all of them


Probes = list[dict[str, Any]]


def forms(folder: Path) -> dict[tuple[str, str, bool], dict[str, Probes]]:
    """Kind, naming and whether it is Transformer Engine's -> version -> probes."""
    found: dict[tuple[str, str, bool], dict[str, Probes]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")]):
        for one in json.loads(path.read_text())["probes"]:
            assert "differs" not in one, f"{path}: {one['mesh']} changes {one['differs']}"
            try:
                megatron.fields(one["args"])
            except NoTable:
                continue
            if one["family"] == "gpt" or one["naming"] != "stacked":  # layers that differ are never stacked
                found[one["family"], one["naming"], one["engine"]][path.stem].append(one)
    return found


def alike(kind: str, by_version: Mapping[str, Probes]) -> Iterator[list[str]]:
    """Versions in a row that one set of rows can describe, as long as possible."""
    group: list[str] = []
    for version in by_version:
        try:
            Form(kind, [one for v in [*group, version] for one in by_version[v]]).rows()
        except Contradiction as reason:
            print(f"  {version} differs: {str(reason)[:150]}")
            yield group
            group = []
        group = [*group, version]
    yield group


def runs(numbers: list[int]) -> str:
    """Numbers of rows as `0-4 7`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def check(rows: list[TableRow], probes: list[dict[str, Any]], what: str) -> int:
    """How many probes there are, all of which say what the rows say.

    Raises:
        SystemExit: one says something else.
    """
    for one in probes:
        said = {key: list(t.shape) for key, t in expand(rows, RANGES, megatron.fields(one["args"])).items()}
        if said != one["shapes"]:
            odd = {key for key in said.keys() | one["shapes"].keys() if said.get(key) != one["shapes"].get(key)}
            shown = {key: (said.get(key), one["shapes"].get(key)) for key in sorted(odd)[:4]}
            raise SystemExit(f"{what}: {len(odd)} keys (table, megatron-core) {shown} of {one['args']}")
    return len(probes)


def fit(folder: Path) -> None:
    """Write the table."""
    tables: dict[str, Any] = {}
    versions: set[str] = set()
    proven = 0
    for (kind, naming, engine), by_version in forms(folder).items():
        versions |= by_version.keys()
        table = tables.setdefault(kind, {"ranges": RANGES, "rows": [], "forms": []})
        for group in alike(kind, by_version):
            what = f"{kind}, {naming}, {'Transformer Engine' if engine else 'local'} ({', '.join(group)})"
            probes = [one for version in group for one in by_version[version]]
            rows = Form(kind, [one for number, one in enumerate(probes) if number % 5 != 4]).rows()
            proven += check(rows, probes[4::5], what)
            numbers = []
            for row in rows:
                line = [row.name, list(row.dims), *[row.exists] * bool(row.exists)]
                if line not in table["rows"]:
                    table["rows"].append(line)
                numbers.append(table["rows"].index(line))
            table["forms"].append({"naming": naming, "engine": engine, "versions": group, "rows": runs(numbers)})
            print(f"{what}: {len(probes)} probes, {len(rows)} rows")
    order = sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    made = {"made_with": f"megatron-core {order[0]} to {order[-1]}", "versions": order}
    lines = [("", made), *sorted(tables.items())]
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in lines)
    TABLE.write_text(f"{{\n{body}\n}}\n")
    print(f"{TABLE.name}: {TABLE.stat().st_size:,} bytes; {proven} probes held out, all as predicted")


def main() -> None:
    """Probe or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    probing = commands.add_parser("probe")
    probing.add_argument("--core", action="append", required=True, metavar="VERSION=FOLDER")
    probing.add_argument("--probes", type=int, default=100)
    probing.add_argument("--out", type=Path, required=True)
    fitting = commands.add_parser("fit")
    fitting.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "probe":
        probe(dict(core.split("=", 1) for core in options.core), options.probes, options.out)
    else:
        fit(options.folder)


if __name__ == "__main__":
    main()
