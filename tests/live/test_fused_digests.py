"""The kernels of digests give what the eager operations give; without them nothing is lost but speed."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

from test_digest import DTYPES, STRIDED, tensor, whole  # noqa: E402

from ckptlint.live.collect import fused_digests  # noqa: E402
from ckptlint.live.collect import tensor_digest as digest  # noqa: E402
from ckptlint.live.collect.tensor_digest import Chunk, elem_digests, word_digests  # noqa: E402

KERNELS = "ckptlint.live.collect.digest_kernels"


# ---------------------------------------------------------------- the kernels, in Triton's interpreter


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls a function in a process whose kernels run on the CPU: Triton reads its setting when they are defined."""
    pytest.importorskip("triton", reason="needs triton, which the ci extra brings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield lambda check: process.submit(check).result()


def assert_equal_to_eager(tensors: list[Any], chunks: list[Chunk], **settings: int) -> None:
    """The digests of both ways are equal; eager are only words that are not in order, and chunks of many axes."""
    warnings.filterwarnings("ignore", "ComplexHalf support")
    eager = word_digests(tensors), elem_digests(chunks)
    left: list[Any] = []

    def collect(items: list[Any], *functions: Any) -> Any:
        left.extend(item for item in items if item is not None)
        return real(items, *functions)

    real = digest._collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_digests, "_FUSED_ON", "cpu")
        patch.setattr(digest, "_collect", collect)
        for name, value in settings.items():
            patch.setattr(fused_digests, name, value)
        fused = word_digests(tensors), elem_digests(chunks)
    for expected, given in zip(eager, fused, strict=True):
        assert expected[1].all() and given[1].all()
        wrong = np.flatnonzero(expected[0] != given[0]).tolist()
        assert not wrong, wrong
    runs = [digest._run(chunk) for chunk in chunks]
    not_in_order = [t for t in tensors if not digest._readable(t).is_contiguous()]
    assert len(left) == len(not_in_order) + sum(len(run.strides) > fused_digests.MOST_AXES for run in runs if run)


def within(value: Any) -> Chunk:
    """The tensor as a chunk of a larger one."""
    return Chunk(value, tuple(range(value.dim())), value.shape, tuple(size + 7 for size in value.shape))


def every_dtype_and_stride() -> None:
    tensors = []
    for dtype in DTYPES:
        tensors += [tensor(dtype, shape) for shape in ((), (1,), (7,), (0, 3), (3, 5, 7))]
        tensors += [change(tensor(dtype, (12, 15))) for change in STRIDED.values()]
        tensors.append(tensor(dtype, (3, 10))[1:])
    tensors.append(torch.nn.Parameter(torch.ones(5)))
    value = tensor("complex64", (5, 3))
    tensors += [value.conj(), value.conj().imag, value.real, value.imag]
    tensors += [tensor("bfloat16", (3,) * axes)[(slice(2),) * axes].transpose(0, 2) for axes in (5, 6, 7)]
    assert_equal_to_eager(tensors, [within(t) for t in tensors])


def every_address_and_tail() -> None:
    data = tensor("uint8", (200_000,))
    tensors = [data[start : start + 16 + size] for start in (0, 1, 4, 8, 15) for size in range(9)]
    tensors += [data[start : start + 65_536 + size] for start in (0, 3, 8) for size in (0, 5, 8, 70_001)]
    tensors += [tensor("bfloat16", (40_000,))[1:], tensor("float64", (20_000,))[1:]]
    assert_equal_to_eager(tensors, [within(t) for t in tensors[-4:]])


def several_tables_and_larger_tiles() -> None:
    tensors = [tensor("uint8", (size,), size) for size in (0, 3, 4096, 20_001, *range(40, 60))]
    tensors += [tensor("float32", (60, 70), 1)[:, 1:], tensor("float32", (90, 30), 2).t(), tensor("int16", (5_000,), 3)]
    far = [Chunk(t, (2**40, 2**39 + 5)[: t.dim()], t.shape, (2**42, 2**41)[: t.dim()]) for t in tensors]
    settings = {"TABLE_BYTES": 1024, "_TILE": 64, "_WORDS": 32, "_ELEMENTS": 64}
    assert_equal_to_eager(tensors, far, **settings)


@pytest.mark.ci
@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("check", [every_dtype_and_stride, every_address_and_tail, several_tables_and_larger_tiles])
def test_kernels_are_the_eager_digests(interpreted: Any, check: Callable[[], None]) -> None:
    interpreted(check)


def compile_all() -> None:
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ckptlint.live.collect import digest_kernels

    words = [{"ALIGNED": aligned, "TILE": 8192, "STEP": 2048} for aligned in (16, 8, 1)]
    integers = digest_kernels.INTEGERS.values()
    elements = [
        {"INTEGER": kind, "AXES": axes, "STEP": 1024} for kind, axes in zip(integers, (1, 2, 1, 6), strict=True)
    ]
    for kernel, every in ((digest_kernels.word_tiles, words), (digest_kernels.element_tiles, elements)):
        for constants in every:
            signature = dict.fromkeys(("rows", "sums"), "*i64") | dict.fromkeys(constants, "constexpr")
            binary = compiled(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
            assert binary.asm["cubin"]


@pytest.mark.ci
def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton, which the ci extra brings")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(compile_all).result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_takes_the_kernels_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton, which torch brings")
    value = torch.ones(2**28, dtype=torch.bfloat16, device="cuda").reshape(2**14, 2**14)
    small = [torch.ones(64, 32, device="cuda") for _ in range(50_000)]
    monkeypatch.setattr(digest, "_words_of", None)  # an eager sum of something large would raise
    monkeypatch.setattr(digest, "_elements_of", None)
    for measure in (
        lambda: word_digests([value, *small]),
        lambda: elem_digests([whole(value.t()), *map(whole, small)]),
    ):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        measure()
        assert torch.cuda.max_memory_allocated() - before <= 4 * 2**20
    assert not fused_digests._failed


# ---------------------------------------------------------------- without them


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be launched: arguments of `_launch`, with kernels that need no Triton, for tensors on the CPU."""
    kernels = ModuleType(KERNELS)
    vars(kernels).update(word_tiles=None, element_tiles=None, INTEGERS={1: None, 2: None, 4: None})
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(fused_digests, "_FUSED_ON", "cpu")
    monkeypatch.setattr(fused_digests, "_failed", False)
    calls: list[Any] = []
    monkeypatch.setattr(fused_digests, "_launch", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.usefixtures("launched")
def test_after_an_error_digests_are_eager_and_a_warning_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [tensor("float32", (5, 3)), tensor("bfloat16", (7,)).view(7, 1), tensor("uint8", (0,))]
    tries = []

    def fail(*arguments: Any) -> None:
        tries.append(arguments)
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(fused_digests, "_launch", fail)
    with pytest.warns(UserWarning, match="without Triton, more slowly: RuntimeError: Failed to find C") as said:
        first = word_digests(values), elem_digests([whole(value) for value in values])
    assert len(said) == 1 and len(tries) == 1
    monkeypatch.setattr(fused_digests, "_FUSED_ON", "cuda")
    eager = word_digests(values), elem_digests([whole(value) for value in values])
    for expected, given in zip(eager, first, strict=True):
        assert expected[1].all() and given[1].all() and (expected[0] == given[0]).all()


@pytest.mark.usefixtures("launched")
def test_no_triton_is_no_news(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.delitem(sys.modules, KERNELS)
    monkeypatch.setitem(sys.modules, "triton", None)
    value = tensor("float32", (5, 3))
    (digests, known), failed = word_digests([value]), fused_digests._failed
    monkeypatch.setattr(fused_digests, "_FUSED_ON", "cuda")
    assert failed and known.all() and digests == word_digests([value])[0] and not recwarn.list


@pytest.mark.usefixtures("launched")
def test_no_room_for_a_table_is_said_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(fused_digests, "_launch", fail)
    with pytest.raises(torch.OutOfMemoryError):
        word_digests([torch.ones(3)])
    assert not fused_digests._failed


def ranges(calls: list[Any], tensors: int, unit: int) -> list[list[tuple[int, int]]]:
    """Of each tensor the ranges that are read, in order, those of bytes one by one last; tables are small."""
    read: list[list[tuple[int, int]]] = [[] for _ in range(tensors)]
    for _, rows, _, *_ in calls:
        assert rows.nbytes <= fused_digests.TABLE_BYTES and (rows[:, 1] % unit == 0).all()
        for _, first, end, number, *_ in rows.tolist():
            read[number].append((first, end))
    return read


@pytest.mark.parametrize("kind", ["words", "elements"])
def test_every_element_is_read_once_whatever_the_size(launched: list[Any], kind: str) -> None:
    sizes = [0, 5, 8, 65_536, 65_541, 2**31 - 1, 2**31, 2**33 + 3, 2**43 + 1]
    values = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    if kind == "words":
        fused_digests.word_sums(values)
    else:
        fused_digests.element_sums([digest._Run(value, 2**62, (1,)) for value in values])
    assert len(launched) <= 2
    for size, read in zip(sizes, ranges(launched, len(sizes), 8 if kind == "words" else 8192), strict=True):
        ends = [0, *(end for _, end in read)]
        assert [first for first, _ in read] == ends[:-1] and ends[-1] == size


def test_many_tensors_take_several_tables() -> None:
    count = np.full(100_000, 4096)
    spans = [spans for _, spans in fused_digests.word_spans(np.arange(100_000) * 2, count)]
    assert [len(rows) for rows in spans] == [12_500, 12_500, 75_000]
    tables = list(fused_digests.tables(spans[2], 65_536))
    assert 1 < len(tables) < 32 and all(rows.nbytes <= fused_digests.TABLE_BYTES for rows in tables)
    assert (np.concatenate(tables) == spans[2]).all()
