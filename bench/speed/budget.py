"""How the work of each rule grows with input: python bench/speed/budget.py [--only KIND ...] [--tilings] [--files N].

Each kind of input grows one dimension, all else stays: tensors, chunks of one tensor, files, objects, findings, groups,
layers, experts, storage entries of one file, files of an export, modules of an adapter. Every rule and the reading is
measured in processor time at two sizes, and the exponent between them is printed where the larger one takes long enough
to tell. A neighbour on the machine may slow one of them by half: each time is divided by that of work that is always
the same, just before and after it. What seems to grow too fast is measured again, twice at most, and the shortest time
of each size counts.

With --tilings it is hard tilings instead (`irregular.py`), of 30,000 and 100,000 chunks in 1 to 8 dims; with --files
the whole command on a folder of N payload files: processor time, and memory of its processes together, in which what
they share counts twice. The tables are Markdown, as in docs/benchmarks.md. The command ends in 1 where an exponent is
above 1.2, a tiling takes more than 5 s, or a tiling or folder more than 500 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MOST_EXPONENT, MOST_SECONDS, MOST_MB = 1.2, 5.0, 500
HERE = Path(__file__).parent
_AGAIN = 2
LONG = 0.25
"""Seconds below which start-up and noise hide how a rule grows."""

Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]
Tensors = dict[str, tuple[tuple[int, ...], Chunks]]
WHOLE: Chunks = [((0, 0), (16, 8))]
SHAPE = (16, 8)
ITEM = 4


def write(
    folder: Path,
    tensors: Tensors,
    objects: list[str] | None = None,
    file_of: Callable[[int], int] = lambda _: 0,
    megatron: bool = False,
    unfiled: bool = False,
    gap: int = 0,
) -> None:
    """A DCP folder with torch's own classes; payload files are sparse.

    Args:
        file_of: number of a record -> number of its file.
        unfiled: storage entries belong to keys that nobody has.
        gap: bytes between the records of a file that no entry names.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, object] = {}
    stored, ends = {}, {}

    def place(index: object, length: int) -> None:
        number = file_of(len(stored))
        start = ends.get(number, 0)
        ends[number] = start + length + gap
        stored[index] = _StorageInfo(f"__{number}_0.distcp", start, length)

    properties = TensorProperties(dtype=torch.float32)
    for name, (shape, chunks) in tensors.items():
        pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        described[name] = TensorStorageMetadata(properties, torch.Size(shape), pieces)
        for number, piece in enumerate(pieces):
            of = f"{name}.old" if unfiled else name
            place(MetadataIndex(of, piece.offsets, number), math.prod(piece.sizes) * ITEM + 1600)
    for name in objects or ():
        described[name] = BytesStorageMetadata()
        place(MetadataIndex(name), 700)
    folder.mkdir(parents=True)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, {name: (name,) for name in described}, stored), file)
    for number, end in ends.items():
        with (folder / f"__{number}_0.distcp").open("wb") as payload:
            payload.write(b"PK\3\4"[:end])
            payload.truncate(end)
    if megatron:
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        torch.save({"iteration": 10}, folder / "common.pt")


# ---------------------------------------------------------------- one dimension each


def tensors(folder: Path, count: int) -> None:
    """Tensors of one model without layers, and their optimizer state."""
    names = [f"model.block_{chr(97 + i % 26)}{i}.weight" for i in range(count // 3)]
    states = [f"optim.state.{name[6:]}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    write(folder, dict.fromkeys([*names, *states], (SHAPE, WHOLE)))


def chunks(folder: Path, count: int) -> None:
    """Chunks of one tensor, in a grid."""
    write(folder, {"model.w": ((count, 8), [((i, 0), (1, 8)) for i in range(count)])}, file_of=lambda i: i % 64)


def irregular_chunks(folder: Path, count: int) -> None:
    """Chunks of one tensor, in no grid, healthy."""
    from irregular import irregular

    shape, offsets, sizes = irregular(count, 3, extent=256)
    pairs = zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True)
    write(folder, {"model.w": (shape, list(pairs))}, file_of=lambda i: i % 64)


def damaged_chunks(folder: Path, count: int) -> None:
    """Chunks of one tensor, in no grid, one in a hundred lost and one in a hundred grown into its neighbours."""
    from irregular import irregular, with_holes, with_overlaps

    shape, offsets, sizes = with_overlaps(with_holes(irregular(count, 3, extent=256), count // 100), count // 100)
    pairs = zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True)
    write(folder, {"model.w": (shape, list(pairs))}, file_of=lambda i: i % 64)


def duplicate_chunks(folder: Path, count: int) -> None:
    """Chunks of one tensor, all at one place."""
    write(folder, {"model.w": (SHAPE, WHOLE * count)})


def files(folder: Path, count: int) -> None:
    """Payload files with one record each."""
    write(folder, dict(_model(count // 7)), file_of=lambda i: i)


def files_with_gaps(folder: Path, count: int) -> None:
    """Payload files each of which has bytes that nobody names."""
    write(folder, dict(_model(count // 7)), file_of=lambda i: i, gap=4096)


def missing_files(folder: Path, count: int) -> None:
    """Payload files that are named and not there."""
    write(folder, dict(_model(count // 7)), file_of=lambda i: i)
    for path in folder.glob("*.distcp"):
        path.unlink()


def missing_nodes(folder: Path, count: int) -> None:
    """Payload files of nodes of two ranks, of which every second node lost its own."""
    write(folder, dict(_model(count // 7)), file_of=lambda i: i)
    for number in range(count // 7 * 7):
        if number % 4 > 1:
            (folder / f"__{number}_0.distcp").unlink()


def short_files(folder: Path, count: int) -> None:
    """Payload files that end before their entries."""
    write(folder, dict(_model(count // 7)), file_of=lambda i: i)
    for path in folder.glob("*.distcp"):
        path.write_bytes(b"")


def unnamed_files(folder: Path, count: int) -> None:
    """Payload files that nobody names."""
    write(folder, dict(_model(1)))
    for number in range(1, count):
        with (folder / f"__{number}_0.distcp").open("wb") as payload:
            payload.truncate(4096)


def objects(folder: Path, count: int) -> None:
    """ShardedObjects of one key."""
    names = [f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{i}_{count}" for i in range(count)]
    write(folder, {"decoder.final_layernorm.weight": (SHAPE, WHOLE)}, names, lambda i: i % 64, megatron=True)


def lost_objects(folder: Path, count: int) -> None:
    """ShardedObjects of many keys, of which every second is missing."""
    names = [f"decoder.layers.{i}.mlp._extra_state/shard_0_2" for i in range(count)]
    write(folder, {"decoder.final_layernorm.weight": (SHAPE, WHOLE)}, names, lambda i: i % 64, megatron=True)


def findings(folder: Path, count: int) -> None:
    """Holes that are alike, one in each tensor."""
    write(folder, {name: (shape, [((4, 0), (12, 8))]) for name, (shape, _) in _model(count // 7)})


def groups(folder: Path, count: int) -> None:
    """Findings that are not alike."""
    write(folder, {f"model.p{i}.weight": ((i + 9, 8), [((i % 7 + 1, 0), (8, 8))]) for i in range(count)})


def unfiled(folder: Path, count: int) -> None:
    """Chunks without a storage entry and storage entries without a chunk."""
    write(folder, dict(_model(count // 7)), unfiled=True)


def layers(folder: Path, count: int) -> None:
    """Layers of a model, and their optimizer state."""
    names = dict(_model(count // 21))
    moments = "exp_avg", "exp_avg_sq"
    states = {f"optim.state.{name}.{moment}": shape for name, shape in names.items() for moment in moments}
    write(folder, {**names, **states}, file_of=lambda i: i % 64)


def odd_layers(folder: Path, count: int) -> None:
    """Layers, of which every tenth is missing and every tenth has another shape."""
    names = {}
    for name, held in _model(count // 7):
        number = int(name.split(".")[2])
        if number % 10 != 3:
            names[name] = ((24, 8), [((0, 0), (24, 8))]) if number % 10 == 5 else held
    write(folder, names, file_of=lambda i: i % 64)


def experts(folder: Path, count: int) -> None:
    """Experts of four layers by number, with a router."""
    number = count // 12
    held: Tensors = {f"model.layers.{i}.mlp.gate.weight": ((number, 8), [((0, 0), (number, 8))]) for i in range(4)}
    for i in range(4):
        for expert in range(number):
            for part in ("gate_proj", "up_proj", "down_proj"):
                held[f"model.layers.{i}.mlp.experts.{expert}.{part}.weight"] = SHAPE, WHOLE
    write(folder, held, file_of=lambda i: i % 64)


def lost_experts(folder: Path, count: int) -> None:
    """Experts of four layers, of which every tenth is missing."""
    number = count // 12
    held: Tensors = {f"model.layers.{i}.mlp.gate.weight": ((number, 8), [((0, 0), (number, 8))]) for i in range(4)}
    for i in range(4):
        for expert in range(number):
            for part in ("gate_proj", "up_proj", "down_proj") if expert % 10 != 3 else ():
                held[f"model.layers.{i}.mlp.experts.{expert}.{part}.weight"] = SHAPE, WHOLE
    write(folder, held, file_of=lambda i: i % 64)


def permuted_layers(folder: Path, count: int) -> None:
    """Layers with a second number, as if drawn, so that no two names fold into one."""
    _, held = next(_model(1))
    write(folder, {f"a.{number}.b.{number * 7919 % count}.w": held for number in range(count)})


def crossed_experts(folder: Path, count: int) -> None:
    """Experts of layers whose two numbers are as if drawn, every second with the same hole."""
    shape, whole = next(_model(1))[1]
    lost = [((4, 0), (12, 8))]
    names = [f"model.layers.{i * 7919 % count}.mlp.experts.{i * 104_729 % count}.w{i % 3}.weight" for i in range(count)]
    write(folder, {name: (shape, lost if number % 2 else whole) for number, name in enumerate(names)})


def long_names(folder: Path, count: int) -> None:
    """Keys of almost as many characters as are read, a hundredth as many, which repeat one word."""
    words = "a.", "0.", "layers.0.", "param_groups.", "experts.1.w.", "_", "(", "weight", "exp_avg.", "module."
    names = (
        f"model.{words[i % 10] * (4000 // len(words[i % 10]))}{i * 7919 % count}.weight" for i in range(count // 100)
    )
    write(folder, dict.fromkeys(names, (SHAPE, WHOLE)))


def entries(folder: Path, count: int) -> None:
    """Storage entries of one file."""
    write(folder, dict(_model(count // 7)))


def overlapping_entries(folder: Path, count: int) -> None:
    """Storage entries of one file, each of which begins in the one before."""
    write(folder, dict(_model(count // 7)), gap=-100)


def misplaced_keys(folder: Path, count: int) -> None:
    """Files of an export whose index names another file for each key."""
    folder.mkdir(parents=True)
    files = [f"model-{number + 1:06d}-of-{count:06d}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        _write_safetensors(folder / file, {f"model.layers.{number}.up.weight": [2]})
    places = {f"model.layers.{number}.up.weight": files[number - 1] for number in range(count)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def adapter_factors(folder: Path, count: int) -> None:
    """Modules of an adapter, all of which `target_modules` names."""
    modules = [f"model.layers.{number}.mlp.up_proj" for number in range(count // 2)]
    folder.mkdir(parents=True)
    factors = {f"base_model.model.{name}.lora_{part}.weight": [4, 4] for name in modules for part in "AB"}
    _write_safetensors(folder / "adapter_model.safetensors", factors)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def _model(number: int) -> Iterator[tuple[str, tuple[tuple[int, ...], Chunks]]]:
    parts = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2"]
    for layer in range(number):
        for part in (*parts, "attention_norm"):
            yield f"model.layers.{layer}.{part}.weight", (SHAPE, WHOLE)


KINDS = {
    made.__name__: made
    for made in (
        tensors,
        chunks,
        irregular_chunks,
        damaged_chunks,
        duplicate_chunks,
        files,
        files_with_gaps,
        missing_files,
        missing_nodes,
        short_files,
        unnamed_files,
        objects,
        lost_objects,
        findings,
        groups,
        unfiled,
        layers,
        odd_layers,
        experts,
        lost_experts,
        permuted_layers,
        crossed_experts,
        long_names,
        entries,
        overlapping_entries,
        misplaced_keys,
        adapter_factors,
    )
}


# ---------------------------------------------------------------- measuring


def pace() -> float:
    """Processor seconds of work that is always the same: how fast the machine is just now."""
    started = time.process_time()
    sorted({str(number): number for number in range(20_000)})
    return time.process_time() - started


def measured(folder: Path) -> dict[str, float]:
    """Processor time of the reading, of every rule and of the text, in this process, in paces; and the least pace."""
    from ckptlint.depth import Depth
    from ckptlint.lint.engine import run_rules
    from ckptlint.lint.registry import load_rules
    from ckptlint.loaders.checkpoint import read_checkpoint
    from ckptlint.loaders.discover import find

    taken: dict[str, float] = {}
    paces = [pace()]

    def note(name: str, seconds: float) -> None:
        paces.append(pace())
        taken[name] = seconds * 2 / (paces[-2] + paces[-1])

    started = time.process_time()
    ckpt = read_checkpoint(find(str(folder))[0])
    note("reading", time.process_time() - started)
    for one in load_rules():
        started = time.process_time()
        report = run_rules(ckpt, [one], Depth.FILES)
        note(one.code, time.process_time() - started)
        started = time.process_time()
        for item in report.diagnostics[:64]:
            item.all_notes()
        note(f"{one.code} notes", time.process_time() - started)
    taken["pace"] = min(paces)
    taken["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return taken


def in_child(folder: Path) -> dict[str, float]:
    """The same in a process of its own; the text report of the command line with it."""
    found = subprocess.run(
        [sys.executable, __file__, "--measure", str(folder)], check=True, stdout=subprocess.PIPE, text=True
    )
    taken: dict[str, float] = json.loads(found.stdout)
    pace_before, before = pace(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "ckptlint", "check", str(folder), "--isolated", "--exit-zero"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    taken["whole command"] = seconds * 2 / (pace_before + pace())
    return taken


def grow(kind: str, small: int, factor: int, folder: Path) -> list[str]:
    """One row of the table for each thing that takes long enough; what grows too fast is returned."""
    places = [folder / f"{kind}-{size}" / "step-1" for size in (small, small * factor)]
    for place, size in zip(places, (small, small * factor), strict=True):
        subprocess.run(
            [sys.executable, __file__, "--write", str(place), "--only", kind, "--small", str(size)], check=True
        )
    fasts, slows = map(in_child, places)
    for _ in range(_AGAIN):
        unit = min(fasts["pace"], slows["pace"])
        long = [name for name, slow in slows.items() if slow * unit >= LONG and name not in ("peak MB", "pace")]
        if all(_exponent(fasts[name], slows[name], factor) <= MOST_EXPONENT for name in long):
            break
        again = [in_child(place) for place in places]
        fasts, slows = ({name: min(a[name], b[name]) for name in a} for a, b in zip((fasts, slows), again, strict=True))
    for place in places:
        shutil.rmtree(place)
    steep = []
    peak, unit = slows.pop("peak MB"), min(fasts["pace"], slows.pop("pace"))  # seconds at the best pace of all
    for name, slow in slows.items():
        if slow * unit < LONG:
            continue
        fast, exponent = fasts[name], _exponent(fasts[name], slow, factor)
        print(f"| {kind} | {name} | {fast * unit:.2f} | {slow * unit:.2f} | {exponent:.2f} | {peak:.0f} |", flush=True)
        if exponent > MOST_EXPONENT:
            steep.append(f"{kind}: {name} {exponent:.2f}")
    return steep


def _exponent(fast: float, slow: float, factor: int) -> float:
    return math.log(slow / max(fast, 1e-4)) / math.log(factor)


def judge_files(count: int, folder: Path) -> list[str]:
    """The whole command on a folder of so many payload files, one chunk in each."""
    from ratios import resident

    subprocess.run([sys.executable, str(HERE / "generate.py"), "files", str(count), str(folder)], check=True)
    held = sum(1 for path in folder.iterdir() if path.suffix == ".distcp")
    for depth in ("metadata", "files"):
        before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
        command = [sys.executable, "-m", "ckptlint", "check", str(folder), "--isolated", "--depth", depth, "-qq"]
        process = subprocess.Popen(command)
        while process.poll() is None:
            peak = max(peak, resident(process.pid) / 1e6)
            time.sleep(0.01)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"| {held:,} | {depth} | {seconds:.2f} | {peak:.0f} |", flush=True)
    return [f"{held:,} files: {peak:.0f} MB"] if peak > MOST_MB else []


def judge_tilings(count: int) -> list[str]:
    """Hard tensors with so many chunks, in 1 to 8 dims."""
    slow = []
    for rank in range(1, 9):
        found = subprocess.run(
            [sys.executable, __file__, "--tiling", str(rank), "--small", str(count)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, seconds, peak, exact in json.loads(found.stdout):
            print(
                f"| {count:,} {name} | {rank} | {seconds:.2f} | {peak:.0f} | {'yes' if exact else 'no'} |", flush=True
            )
            if seconds > MOST_SECONDS or peak > MOST_MB:
                slow.append(f"{name} in {rank} dims: {seconds:.1f} s, {peak:.0f} MB")
    return slow


def hard_tilings(rank: int, count: int) -> list[tuple[str, float, float, bool]]:
    """What is hard in so many dims: name, seconds, peak MB of the process, whether the verdict is exact."""
    from irregular import anywhere, irregular, spiral, with_holes, with_overlaps

    from ckptlint.model.tiling import Tiling

    whole = irregular(count, rank)
    made = {
        "irregular, whole": whole,
        "irregular, 20 lost": with_holes(whole),
        "irregular, 20 overlap": with_overlaps(whole),
        "irregular, both": with_overlaps(with_holes(whole)),
        "random boxes, to half of each axis": anywhere(count, rank),
        "random boxes, to a tenth of each axis": anywhere(count, rank, largest=0.1),
    }
    if rank == 2:
        made["spiral, whole"] = spiral(count)
    rows = []
    for name, boxes in made.items():
        started = time.process_time()
        coverage = Tiling(*boxes).coverage
        seconds = time.process_time() - started
        rows.append((name, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, coverage.exact))
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--files", type=int, help="a folder of so many payload files")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tiling", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure)))
        return
    if arguments.write:  # in a process of its own: the peak memory of a child begins with that of its parent
        KINDS[arguments.only[0]](arguments.write, arguments.small)
        return
    if arguments.tiling:
        print(json.dumps(hard_tilings(arguments.tiling, arguments.small)))
        return
    if arguments.tilings:
        print("| chunks | dims | s | peak MB | exact |\n|---|---|---|---|---|")
        broken = judge_tilings(30_000) + judge_tilings(100_000)
    elif arguments.files:
        print("| files | depth | s | peak MB |\n|---|---|---|---|")
        with tempfile.TemporaryDirectory() as temporary:
            broken = judge_files(arguments.files, Path(temporary) / "step-1")
    else:
        small, large = arguments.small, arguments.small * arguments.factor
        print(f"| grows | what | {small:,}: s | {large:,}: s | exponent | peak MB |\n|---|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as temporary:
            broken = [row for kind in arguments.only for row in grow(kind, small, arguments.factor, Path(temporary))]
    print(*(f"over budget: {row}" for row in broken), sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
