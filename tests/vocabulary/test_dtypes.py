"""One row for each dtype says all that formats need."""

from __future__ import annotations

from ckptlint.vocabulary.dtypes import DTYPES, ENCODINGS, FLOATS, nbytes


def test_every_float_says_how_it_writes_nan() -> None:
    assert set(ENCODINGS) >= FLOATS


def test_bytes_of_elements() -> None:
    assert [nbytes(name, 8) for name in ("bool", "bfloat16", "complex128", "quint4x2")] == [8, 16, 128, None]
    assert all(dtype.bits % 8 == 0 for dtype in DTYPES.values())
