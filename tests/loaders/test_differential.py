"""ckptlint against other ways to the same answer: counting cells, torch's validator and reader, safetensors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import REAL, codes, examples
from tilings import Chunk, box_cells, counted, damaged, layout, tilings

import ckptlint
from ckptlint.errors import UnreadableError
from ckptlint.formats.pickles.safe_pickle import read_metadata
from ckptlint.formats.safetensors_header import header_length, layout_faults, parse_header
from ckptlint.lint.registry import load_rules
from ckptlint.loaders.readers.dcp.metadata import describe
from ckptlint.model import Checkpoint, ChunkTable, Tensor
from ckptlint.model.cover import REGION_LIMIT
from ckptlint.model.text import printable
from ckptlint.model.tiling import Box
from ckptlint.rule import Finding, Severity

Case = tuple[tuple[int, ...], list[Chunk]]
METADATA = sorted(path for path in REAL.rglob("*.metadata") if "malicious" not in str(path))


# ---------------------------------------------------------------- verdicts


@cache
def geometry() -> dict[str, Any]:
    return {rule.code: rule for rule in load_rules() if rule.code.startswith("GEO")}


def judged(case: Case) -> dict[str, list[Finding]]:
    """The findings of error level of each geometry rule on one tensor."""
    shape, chunks = case
    table = ChunkTable(layout(shape, chunks), np.full(len(chunks), -1))
    ckpt = Checkpoint("a", "dcp", tensors={"w": Tensor("w", "float32", shape, table)})
    found = {}
    for code, rule in geometry().items():
        items = list(rule.check(ckpt))
        found[code] = [item for item in items if (item.severity or rule.severity) is Severity.ERROR]
    return found


def leaves(shape: tuple[int, ...], chunk: Chunk) -> bool:
    return any(o < 0 or o + s > n for o, s, n in zip(*chunk, shape, strict=True))


@settings(max_examples=examples(15, 400))
@given(damaged())
def test_the_geometry_rules_say_what_counting_cells_says(case: Case) -> None:
    shape, chunks = case
    counts = counted(shape, chunks)
    live = [chunk for chunk in chunks if all(chunk[1])]
    found = judged(case)
    missing = {cell for cell, count in counts.items() if count == 0}
    doubled = {cell for cell, count in counts.items() if count > 1}
    assert bool(found["GEO001"]) == any(leaves(shape, chunk) for chunk in live)
    assert bool(found["GEO004"]) == (bool(missing) and bool(live))
    assert bool(found["GEO006"]) == (bool(missing) and not live)
    if doubled:
        assert found["GEO003"] or found["GEO007"]
    if not any(leaves(shape, chunk) for chunk in live):  # outside of the tensor there are no cells to count
        assert bool(found["GEO003"] or found["GEO007"]) == bool(doubled)
    assert set(box_cells(tuple(item.at.region for item in found["GEO004"] if item.at.region))) <= missing
    for item in found["GEO003"]:
        assert item.at.region and set(box_cells((item.at.region,))) & counts.keys() <= doubled


@given(tilings())
def test_no_tiling_has_an_error(case: Case) -> None:
    assert not any(judged(case).values())


@st.composite
def many(draw: st.DrawFn) -> Case:
    """Up to 300 boxes anywhere in and around a tensor, few of them in line with each other."""
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(0, 300))
    longest = draw(st.integers(1, 12))
    offsets = random.integers(-2, np.array(shape) + 2, (count, len(shape)))
    sizes = random.integers(0, longest + 1, (count, len(shape)))
    return shape, list(zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True))


@settings(max_examples=examples(15, 150))
@given(many())
def test_gaps_and_overlaps_of_many_boxes_are_exact(case: Case) -> None:
    shape, chunks = case
    counts = np.zeros(shape, np.int64)
    for offsets, sizes in chunks:
        counts[tuple(slice(max(o, 0), max(o + s, 0)) for o, s in zip(offsets, sizes, strict=True))] += 1
    coverage = layout(shape, chunks).coverage
    for boxes, volume, wanted in (
        (coverage.missing, coverage.missing_volume, counts == 0),
        (coverage.doubled, coverage.doubled_volume, counts > 1),
    ):
        painted = np.zeros(shape, np.int64)
        for box in boxes:
            painted[inside(box)] += 1
        assert volume == wanted.sum()
        assert painted.max(initial=0) <= 1, "two boxes share a cell"
        assert not (painted.astype(bool) & ~wanted).any()
        assert len(boxes) >= REGION_LIMIT or (painted.astype(bool) == wanted).all()


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.ends, strict=True))


# ---------------------------------------------------------------- torch's validator


@settings(max_examples=examples(15, 300))
@given(damaged())
def test_the_verdict_is_that_of_the_validator_of_torch(case: Case) -> None:
    """Where torch is right: it takes an empty chunk inside another one for an overlap, and looks at no scalar."""
    planner = pytest.importorskip("torch.distributed.checkpoint.default_planner")
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    torch = pytest.importorskip("torch")
    shape, chunks = case[0], [chunk for chunk in case[1] if all(chunk[1])]
    if not shape:
        return
    tensor = metadata.TensorStorageMetadata(
        properties=metadata.TensorProperties(dtype=torch.float32),
        size=torch.Size(shape),
        chunks=[metadata.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
    )
    plans = [planner.SavePlan([]), planner.SavePlan([])]  # with one rank it does not look for holes
    errors = planner._validate_global_plan(plans, metadata.Metadata({"w": tensor}))
    found = judged((shape, chunks))
    assert bool(errors) == any(found.values()), (errors, found)


# ---------------------------------------------------------------- torch's reader


@pytest.fixture(scope="module")
def read_by_torch() -> dict[Path, Any]:
    """What torch reads from each real file, or the name of its error. Malicious files are left out: torch runs them."""
    from torch.distributed.checkpoint import FileSystemReader

    found = {}
    for path in METADATA:
        rank = None if path.name == ".metadata" else int(path.name[2:].partition(".")[0])
        try:
            found[path] = contents(FileSystemReader(path.parent).read_metadata(rank=rank))
        except Exception as error:
            found[path] = type(error).__name__
    return found


def contents(read: Any) -> list[Any]:
    """Tensors, other entries and the number of records of what torch read, as `described` gives them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    def place(index: Any) -> Any:
        info = read.storage_data.get(index)
        return [info.relative_path, info.offset, info.length] if info else None

    tensors, others = {}, {}
    for key, value in read.state_dict_metadata.items():
        if hasattr(value, "chunks"):
            chunks = [[[*c.offsets], [*c.sizes], place(MetadataIndex(key, c.offsets))] for c in value.chunks]
            tensors[key] = [str(value.properties.dtype).removeprefix("torch."), [*value.size], chunks]
        else:
            others[key] = place(MetadataIndex(key))
    return [tensors, others, len(read.storage_data)]


def described(path: Path) -> list[Any]:
    """The same from the safe reader."""
    unpickled = read_metadata(path.read_bytes())
    assert unpickled.refused == ()
    found = describe([unpickled.root], path.name)
    table = found.records

    def place(record: int) -> Any:
        if record < 0:
            return None
        return [found.paths[table.file[record]], int(table.byte_offset[record]), int(table.byte_length[record])]

    def chunks(tensor: Tensor) -> Iterator[Any]:
        rows = zip(tensor.tiling.offsets.tolist(), tensor.tiling.sizes.tolist(), tensor.chunks.record, strict=True)
        yield from ([offsets, sizes, place(record)] for offsets, sizes, record in rows)
        yield from ([[*chunk.offsets], [*chunk.sizes], None] for chunk in tensor.malformed)

    tensors = {t.fqn: [t.dtype, [*t.global_shape], [*chunks(t)]] for t in found.tensors.values()}
    return [tensors, {fqn: place(row) for fqn, row in found.byte_records.items()}, len(table)]


def test_every_real_file_is_read_as_torch_reads_it(read_by_torch: dict[Path, Any]) -> None:
    wrong = []
    for path, theirs in read_by_torch.items():
        if isinstance(theirs, str):
            if theirs not in ("UnpicklingError", "ModuleNotFoundError"):  # damaged; with classes of megatron-core
                wrong.append(f"{path}: torch ended with {theirs}")
            continue
        tensors, others, records = theirs
        for _, shape, chunks in tensors.values():
            for chunk in chunks:
                if not len(chunk[0]) == len(chunk[1]) == len(shape):  # GEO002; no rule asks where it is stored
                    chunk[2] = None
        wanted = [{printable(key): value for key, value in part.items()} for part in (tensors, others)]
        try:
            ours: Any = described(path)
        except Exception as error:
            ours = repr(error)
        if ours != [*wanted, records]:
            wrong.append(f"{path}: {ours} instead of {[*wanted, records]}")
    assert not wrong, "\n".join(wrong)


def test_torch_reads_nearly_all_of_them(read_by_torch: dict[Path, Any]) -> None:
    refused = [path for path, found in read_by_torch.items() if isinstance(found, str)]
    assert len(read_by_torch) > 200 and len(refused) <= 6  # four hold classes of Megatron


# ---------------------------------------------------------------- the safetensors library

_TOKENS = b'0 1 16 " {} [] null -1 F16 , 1.0 1e1 "a" F8_E4M3 "__metadata__":{}, "x":1,'.split()


def edited(head: bytearray, chance: random.Random) -> bytes:
    """A header with up to three places changed."""
    for _ in range(chance.randint(1, 3)):
        at, other = chance.randrange(len(head)), chance.randrange(len(head))
        match chance.randrange(4):
            case 0:
                head[at : at + chance.randint(0, 3)] = chance.choice(_TOKENS)
            case 1:
                del head[at : at + chance.randint(1, 4)]
            case 2:
                head[at] = chance.randrange(256)
            case _:
                head[at:at] = head[other : other + chance.randint(1, 60)]
    return bytes(head)


@pytest.mark.parametrize("blanks", [b" ", b"\n", b"\t", b"\r\n  ", b" " * 100, b"\x0b", b"\0", b"\xef\xbb\xbf"])
def test_blanks_before_a_header_are_taken_as_the_library_takes_them(blanks: bytes, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    head = blanks + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4) + b"\0\0\x80?")
    try:
        library.deserialize((tmp_path / "model.safetensors").read_bytes())
        is_taken = True
    except library.SafetensorError:
        is_taken = False
    report = ckptlint.check(tmp_path, depth="data")
    assert (codes(report, "error", "warning"), report.exit_code) == ((set(), 0) if is_taken else ({"PAY013"}, 1))


def entry(dtype: str = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def headers() -> Iterator[tuple[str, int]]:
    """Headers at every limit of the format, and the bytes that follow each.

    Left out are those where the two differ for a reason. Of two equal names the library takes the last, and other
    readers the first. No writer gives an entry as a list, which the library takes, or a size as -0, which it refuses.
    A size of 2**63 and more beside a 0, 65 axes and a key of over 4,096 characters are past ckptlint's limits.
    """
    texts = (None, {}, [], ["a"], "", "a", 0, 1, False, 1.5, {"a": "b"}, {"a": 1}, {"a": None}, {"a": []})
    yield from ((json.dumps({"__metadata__": value, "a": entry()}), 8) for value in texts)
    for name in ("BOOL", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "C64", "C128", "I4", "f32", "F32X", ""):
        for size, stored in ((3, 2), (4, 2), (4, 3), (4, 4), (2, 16)):
            yield json.dumps({"a": entry(name, [size], [0, stored])}), stored
    for shape in ([2**63], [2**64], [2**32, 2**32], [2**61], [2**40, 0], [0], [], [-1], [1.0], [True], None, "2"):
        yield json.dumps({"a": entry(shape=shape, span=[0, 0])}), 0
    for span in ([0, 8, 8], [0], [8, 0], [-1, 7], [0.0, 8.0], ["0", "8"], None, [2**63, 2**63 + 8]):
        yield json.dumps({"a": entry(span=span)}), 8
    places = [[8, 16]], [[0, 8], [16, 24]], [[0, 8], [4, 12]], [[0, 8], [0, 8]], [[8, 16], [0, 8]], [[0, 8]]
    for spans in places:
        held = {f"w{number}": entry(span=span) for number, span in enumerate(spans)}
        yield from ((json.dumps(held), max(stop for _, stop in spans) + more) for more in (-1, 0, 1))
    for at in (4, 8, 12):
        yield json.dumps({"a": entry(), "empty": entry(shape=[0], span=[at, at])}), 8
    whole = json.dumps({"a": entry()})
    yield from ((blank + whole, 8) for blank in (" ", "\n", "\v", "\0", "\ufeff"))
    yield from ((whole + blank, 8) for blank in (" ", "\n", "\0", "x", "}"))
    yield from ((text, 0) for text in ("{}", "[]", "null", "", "{", json.dumps({"a": None}), json.dumps({"a": {}})))
    yield from ((json.dumps({"__metadata__": {}})[:-1] + more, 8) for more in (f", {whole[1:]}", f", {whole}"))


def test_a_safetensors_header_at_the_limits_is_taken_as_the_library_takes_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors", minversion="0.8")
    wrong = []
    for number, (text, stored) in enumerate(headers()):
        head = text.encode()
        data = len(head).to_bytes(8, "little") + head + b"\1" * stored
        path = tmp_path / str(number) / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(data)
        try:
            library.deserialize(data)
            is_taken = True
        except library.SafetensorError:
            is_taken = False
        report = ckptlint.check(path.parent, select=["PAY", "SAF"])
        if is_taken != (report.exit_code == 0):
            wrong.append((text, stored, report.exit_code))
    assert number > 120 and not wrong


@pytest.mark.sweep
def test_a_safetensors_header_is_taken_where_the_library_takes_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    chance = random.Random(1)
    files = [path.read_bytes() for path in sorted((REAL / "hf_sharded").glob("*.safetensors"))]
    taken, refused, tries, checks = 0, 0, examples(4_000, 40_000), examples(5, 60)
    for _ in range(tries):
        data = chance.choice(files)
        length = int.from_bytes(data[:8], "little")
        head, payload = edited(bytearray(data[8 : 8 + length]), chance), data[8 + length :]
        data = len(head).to_bytes(8, "little") + head + payload
        try:
            library.deserialize(data)
            theirs = ""
        except Exception as error:
            theirs = str(error)
        try:
            parsed = parse_header(data[8 : 8 + header_length(data[:64], len(data))], 8 + len(head))
            ours = "".join(sentence for sentence, _, _ in layout_faults(parsed, len(data)))
        except UnreadableError as error:
            ours = str(error)
        if not theirs:
            taken += 1
            assert not ours or "repeats a name" in ours, (head, ours)  # of two equal names the library takes the last
        elif not ours and refused < checks:
            refused += 1  # a whole check sees more than the header
            (tmp_path / "model.safetensors").write_bytes(data)
            report = ckptlint.check(tmp_path)
            assert report.exit_code == 1, (head, theirs)
    assert taken > tries / 40 and refused == checks
