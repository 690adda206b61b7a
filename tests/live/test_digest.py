"""Digests of tensors are those of numpy, bit by bit, for every dtype, stride and device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples

from ckptlint.seals.digests import GOLD, MASK, elem_digest, elements, finalise

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:torch.quantize_per_tensor")

from ckptlint.live.collect import tensor_digest as digest  # noqa: E402
from ckptlint.live.collect.tensor_digest import Chunk, elem_digests, live_object_digest, word_digests  # noqa: E402
from ckptlint.live.compare.difference import _shaped  # noqa: E402

DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex32", "complex64"),
    *("complex128", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A contiguous tensor of random bits, NaN of all kinds among them."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape))
    data = bytearray(random.Random(seed).randbytes(count * kind.itemsize) + bytes(kind.itemsize))
    if dtype == "bool":
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=kind, count=count).reshape(shape) if count else torch.empty(shape, dtype=kind)


def raw(value: Any) -> bytes:
    """The bytes of a tensor in row-major order."""
    value = torch.view_as_real(value.detach().cpu()) if value.is_complex() else value.detach().cpu()
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def word_digest(data: bytes) -> int:
    """The formula of `word_digests`."""
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
    keys = np.arange(len(words), dtype=np.uint64) * np.uint64(GOLD)
    return int(finalise(np.array([len(data), *(words ^ keys)], np.uint64)).sum())


def twin(value: Any, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The digest of the numpy side."""
    parts = 2 if value.is_complex() else 1
    bits = np.frombuffer(raw(value), f"<u{value.element_size() // parts}")
    return elem_digest(bits, elements(offsets, value.shape, shape), parts=parts)


def words(*tensors: Any) -> list[int]:
    found, known = word_digests(tensors)
    assert known.all()
    return [int(word) & MASK for word in found]


def elems(*chunks: Chunk) -> list[int]:
    found, known = elem_digests(chunks)
    assert known.all()
    return [int(word) & MASK for word in found]


def whole(value: Any) -> Chunk:
    return Chunk(value, (0,) * value.dim(), value.shape, value.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_the_numpy_twin(dtype: str, device: str) -> None:
    for shape in ((), (1,), (7,), (0, 3), (5, 3), (3, 5, 7), (129, 257)):
        value = tensor(dtype, shape)
        there = value.to(device)
        assert words(there) == [word_digest(raw(value))]
        assert elems(whole(there)) == [twin(value, (0,) * len(shape), shape)]
        place, around = tuple(2 for _ in shape), tuple(size + 5 for size in shape)
        assert elems(Chunk(there, place, shape, around)) == [twin(value, place, around)]


STRIDED = {
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 3:11],
    "every second": lambda t: t[::2, 1::2],
    "rows from the middle, not aligned": lambda t: t[1:4],
    "permuted": lambda t: t.reshape(6, 2, 5, 3).permute(2, 0, 3, 1),
    "expanded": lambda t: t[:, :1].expand(12, 7),
    "flipped": lambda t: t.flip(0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("name", STRIDED)
def test_strides_do_not_matter(name: str, dtype: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = STRIDED[name](tensor(dtype, (12, 15)).to(device))
    shape = tuple(size + 3 for size in value.shape)
    offsets = tuple(range(value.dim()))
    before = value.clone()
    for block in (1 << 16, 16, 5):
        monkeypatch.setitem(digest._BLOCK, device, block)
        monkeypatch.setattr(digest, "_SMALL", 1 << 14 if block == 16 else 0)
        assert words(value) == [word_digest(raw(value))]
        assert elems(Chunk(value, offsets, value.shape, shape)) == [twin(value, offsets, shape)]
    assert raw(value) == raw(before)


def test_conjugate_and_negative_views_are_what_they_read_as() -> None:
    value = tensor("complex64", (5, 3))
    for view in (value.conj(), value.conj().imag, value.real):
        assert words(view) == [word_digest(raw(view.resolve_conj().resolve_neg()))]
        assert elems(whole(view)) == [twin(view.resolve_conj().resolve_neg(), (0, 0), (5, 3))]


@given(st.data())
@settings(max_examples=examples(15, 60))
def test_many_tensors_at_once_are_each_by_itself(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    values = [tensor(d, tuple(s), i) for i, (d, s) in enumerate(zip(dtypes, shapes, strict=True))]
    arounds = [tuple(size + data.draw(st.integers(0, 3)) for size in shape) for shape in shapes]
    places = [tuple(n - size for n, size in zip(a, s, strict=True)) for a, s in zip(arounds, shapes, strict=True)]
    chunks = [Chunk(v, p, v.shape, a) for v, p, a in zip(values, places, arounds, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_SMALL", data.draw(st.sampled_from([0, 8, 1 << 14])))
        patch.setitem(digest._BLOCK, "cpu", data.draw(st.sampled_from([1, 64, 1 << 15])))
        assert words(*values) == [word_digest(raw(value)) for value in values]
        assert elems(*chunks) == [twin(v, p, a) for v, p, a in zip(values, places, arounds, strict=True)]


def test_axes_of_size_one_may_be_added_or_missing() -> None:
    value = tensor("float32", (4, 6))
    expected = twin(value[None], (2, 0, 0), (5, 4, 6))
    assert elems(Chunk(value, (2, 0, 0), (1, 4, 6), (5, 4, 6))) == [expected]
    assert elems(Chunk(value[:, None], (2, 0, 0), (1, 4, 6), (5, 4, 6))) == [expected]
    assert not elem_digests([Chunk(value, (0, 0), (6, 4), (6, 4))])[1][0]


@pytest.mark.parametrize("device", DEVICES)
def test_every_sharding_sums_to_the_digest_of_the_tensor(device: str) -> None:
    value = tensor("bfloat16", (24, 10, 6)).to(device)
    (expected,) = elems(whole(value))
    for cuts in ([6] * 4, [10, 14], [24], [1] * 24):
        for axis, scale in ((0, 1), (1, 2.4), (2, 4)):
            sizes = [int(size / scale) for size in cuts]
            sizes[-1] += value.shape[axis] - sum(sizes)
            parts = value.split(sizes, axis)
            chunks = []
            for number, part in enumerate(parts):
                offsets = [0, 0, 0]
                offsets[axis] = sum(sizes[:number])
                chunks.append(Chunk(part, offsets, part.shape, value.shape))
            assert sum(elems(*chunks)) & MASK == expected
    halves = value.chunk(2)
    wrong = [
        Chunk(halves[1], (0, 0, 0), (12, 10, 6), value.shape),
        Chunk(halves[0], (12, 0, 0), (12, 10, 6), value.shape),
    ]
    assert sum(elems(*wrong)) & MASK != expected


@pytest.mark.parametrize("device", DEVICES)
def test_every_flipped_bit_is_seen(device: str) -> None:
    value = tensor("float32", (64,), 3).view(torch.int32).to(device)
    copies = value.repeat(2001, 1)
    for bit in range(2000):
        at = bit * 64 // 2000
        copies[bit, at] ^= 1 << (bit % 31)
    values = [row.view(torch.float32) for row in copies]
    distinct = len({raw(row) for row in copies})
    assert len(set(words(*values))) == distinct
    assert len(set(elems(*map(whole, values)))) == distinct
    assert distinct > 1900


def test_order_length_and_sign_of_zero_are_seen() -> None:
    count = torch.arange(64.0)
    swapped = count.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    values = [torch.ones(64), 2 * torch.ones(64), count, swapped, -count, torch.tensor([-0.0])]
    zeros = [torch.zeros(number, dtype=torch.uint8) for number in range(40)]
    assert len(set(words(*values, *zeros))) == len(values) + len(zeros)


def test_what_has_no_digest_is_known() -> None:
    class Wrapper(torch.Tensor):
        """A subclass that holds another tensor."""

        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("its operations are not ours to call")

    class Marked(torch.Tensor):
        """A subclass that is a tensor all the same."""

    value = torch.ones(4, 4)
    none = [
        Wrapper(value),
        value.to_sparse(),
        value.to("meta"),
        torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    ]
    some = [value, torch.nn.Parameter(value), value.as_subclass(Marked), torch.ones(4, 4, requires_grad=True)]
    found, known = word_digests([*none, *some])
    assert known.tolist() == [False] * len(none) + [True] * len(some)
    assert len(set(found[len(none) :].tolist())) == 1
    chunks = [Chunk(t, (0, 0), (4, 4), (4, 4)) for t in (*none, *some)]
    assert elem_digests(chunks)[1].tolist() == known.tolist()
    packed = torch.ones(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert word_digests([packed])[1].all() and not elem_digests([Chunk(packed, (0, 0), (4, 4), (4, 4))])[1].any()
    assert [len(part) for part in (*word_digests([]), *elem_digests([]))] == [0] * 4


def test_objects_may_hold_tensors() -> None:
    value = {"step": torch.tensor(3), "dtype": torch.bfloat16, "device": torch.device("cpu"), "shape": torch.Size([2])}
    same = dict(reversed(value.items()))
    assert live_object_digest(value) == live_object_digest(same) is not None
    assert live_object_digest(value | {"step": torch.tensor(4)}) != live_object_digest(value)
    assert live_object_digest(value | {"step": torch.tensor([3])}) != live_object_digest(value)
    assert live_object_digest(value | {"step": torch.ones(2).to_sparse()}) is None


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_of_the_job_is_touched(device: str) -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    value = torch.ones(300, 200, device=device, requires_grad=True)
    word_digests([value, value.t()])
    elem_digests([whole(value.t())])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled() and value.grad_fn is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_scratch_on_the_device_is_bounded() -> None:
    value = torch.ones(2**28, dtype=torch.bfloat16, device="cuda").reshape(2**14, 2**14)
    for view in (value, value.t(), value[:, 1:]):
        for measure in (lambda view=view: word_digests([view]), lambda view=view: elem_digests([whole(view)])):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            measure()
            assert torch.cuda.max_memory_allocated() - before <= 64 * 2**20


@pytest.mark.parametrize("left", [0, 7], ids=["all", "most"])
@pytest.mark.parametrize("shape", [(), (3,), (40, 1000), (8, 3, 5)], ids=str)
def test_freed_memory_is_not_read(shape: tuple[int, ...], left: int) -> None:
    whole, freed = torch.ones(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64).T
    freed.untyped_storage().resize_(left)
    chunks = [Chunk(value, (0,) * len(shape), tuple(value.shape), tuple(value.shape)) for value in (whole, freed)]
    for found, known in (word_digests([whole, freed]), elem_digests(chunks)):
        assert known.tolist() == [True, False] and found[0] and not found[1]
    assert live_object_digest({"a": [freed]}) is None and _shaped(freed, freed.shape) is None
    assert digest.freed_bytes(freed) == (left, 8 * whole.numel()) and digest.freed_bytes(whole) is None
    for kept in (torch.ones(3).expand(10**12, 3), torch.zeros(0, 4), torch.ones(8)[2::3], torch.eye(3).to_sparse()):
        assert digest.freed_bytes(kept) is None
