"""A hundred kinds of states on two ranks, healthy and with one fault: none is refused, and no fault goes unsaid."""

from __future__ import annotations

import random
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import make_dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from jobs import run_ranks
from support import sweep_only
from test_edges import Anything, Hour, Listed, Settings, Shy, Unprintable, Wrapped, with_attribute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ckptlint import live

Kind = Callable[[int], Any]
"""Makes a value; 1 for one with a fault."""

BITS = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]  # fmt: skip
NUMBERS = ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "M8[s]", "m8[s]", "U3", "S3"]
Pair = make_dataclass("Pair", ["left", "right"])


def tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Kind:
    def made(fault: int) -> torch.Tensor:
        data = torch.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8)
        data[-1 if dtype != torch.bool else 0] = fault
        return data.view(dtype).reshape(shape)

    return made


def kinds() -> dict[str, Kind]:
    mesh = init_device_mesh("cpu", (2,))

    def placed(placement: Any, local: Callable[[int], torch.Tensor]) -> Kind:
        return lambda fault: DTensor.from_local(local(fault), mesh, [placement], run_check=False)

    made: dict[str, Kind] = {f"{dtype} {shape}": tensor(dtype, shape) for dtype in BITS for shape in ((4,), (2, 3))}
    made |= {f"array {name}": lambda fault, name=name: np.array([0, fault]).astype(name) for name in NUMBERS}
    scalars: list[Kind] = [
        lambda fault: fault, lambda fault: bool(fault), lambda fault: 0.5 + fault, lambda fault: 1j * fault,
        lambda fault: f"a{fault}", lambda fault: b"a%d" % fault, lambda fault: fault or None,
        lambda fault: bytearray([fault]), lambda fault: BytesIO(bytes([fault])), lambda fault: 10 ** (5000 + fault),
        lambda fault: np.float32(fault), lambda fault: np.int64(fault), lambda fault: Decimal(fault),
        lambda fault: Fraction(fault), lambda fault: date(2020, 1, 1 + fault), lambda fault: Path(f"a{fault}"),
        lambda fault: range(fault), lambda fault: (torch.float32, torch.float64)[fault],
        lambda fault: torch.Size([fault]), lambda fault: Unprintable(fault), lambda fault: complex(0.0, fault),
        lambda fault: (torch.device("cpu"), torch.device("meta"))[fault], lambda fault: (int, float)[fault],
    ]  # fmt: skip
    made |= {f"scalar {number}": kind for number, kind in enumerate(scalars)}
    for number, kind in enumerate([*scalars[:6], tensor(torch.float32, (2,)), tensor(torch.bfloat16, (3,))]):
        made |= {
            f"list of {number}": lambda fault, kind=kind: [kind(fault), 1],
            f"tuple of {number}": lambda fault, kind=kind: (kind(fault), 1),
            f"mapping of {number}": lambda fault, kind=kind: {"a": {"b": kind(fault)}},
            f"namespace of {number}": lambda fault, kind=kind: Namespace(a=kind(fault)),
            f"dataclass of {number}": lambda fault, kind=kind: Pair(1, kind(fault)),
        }
    return made | {
        "set": lambda fault: {1, fault},
        "frozenset": lambda fault: (frozenset({1, fault}),),
        "counter": lambda fault: Counter(a=fault + 1),
        "ordered": lambda fault: (OrderedDict(a=fault),),
        "default": lambda fault: (defaultdict(int, a=fault),),
        "deque": lambda fault: deque([fault]),
        "enum": lambda fault: next(iter(Hour)) if not fault else None,
        "object": lambda fault: Anything() if not fault else Shy(),
        "listed": lambda fault: with_attribute(Listed([1]), fault),
        "settings": lambda fault: with_attribute(Settings(), fault),
        "masked": lambda fault: np.ma.masked_array([1, 2], mask=[0, fault]),
        "record": lambda fault: np.array([(1, fault)], [("a", "i4"), ("b", "i4")]),
        "array of objects": lambda fault: np.array([fault, "a"], object),
        "parameter": lambda fault: torch.nn.Parameter(torch.full((2,), float(fault))),
        "buffer": lambda fault: torch.nn.Buffer(torch.full((2,), float(fault))),
        "gap": lambda fault: torch.arange(12.0).reshape(3, 4)[:, ::2] + fault,
        "turned": lambda fault: torch.arange(6.0).reshape(2, 3).T + fault,
        "conjugate": lambda fault: torch.tensor([1j + fault]).conj(),
        "expanded": lambda fault: torch.full((1,), float(fault)).expand(5),
        "scalar tensor": lambda fault: torch.tensor(float(fault)),
        "other shape": lambda fault: torch.zeros(2 + fault),
        "other dtype": lambda fault: torch.zeros(2, dtype=(torch.float32, torch.float64)[fault]),
        "empty": lambda fault: torch.zeros(0, 2 + fault),
        "axes": lambda fault: torch.full((1,) * 65, float(fault)),
        "sparse": lambda fault: torch.tensor([0.0, 1.0 + fault]).to_sparse(),
        "nested": lambda fault: torch.nested.nested_tensor([torch.ones(2), torch.ones(3) + fault]),
        "jagged": lambda fault: torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3) + fault], layout=torch.jagged
        ),
        "quantised": lambda fault: torch.quantize_per_tensor(torch.ones(2) + fault, 0.1, 0, torch.qint8),
        "wrapped": lambda fault: Wrapped(torch.ones(2, dtype=torch.int8), torch.ones(1) + fault),
        "random state": lambda fault: random.Random(3).getstate() if not fault else None,
        "replicated": placed(Replicate(), lambda fault: torch.ones(2, 2) + fault),
        "rows": placed(Shard(0), lambda fault: torch.ones(2, 2, device=("cpu", "meta")[fault])),
        "columns": lambda fault: DTensor.from_local(
            torch.ones(2, 2 + fault), mesh, [Shard(1)], run_check=False, shape=torch.Size([2, 4]), stride=(4, 1)
        ),
        "sums": lambda fault: placed((Replicate(), Partial())[fault], lambda _: torch.ones(2))(fault),
    }  # fmt: skip


@sweep_only
def test_every_kind_is_compared_or_named(tmp_path: Path) -> None:
    def job(rank: int) -> tuple[int, list[str]]:
        warnings.simplefilter("ignore")
        live.install(timeout=60)
        wrong, all_kinds = [], kinds()
        for number, (name, kind) in enumerate(all_kinds.items()):
            said = []
            for turn, fault in enumerate((0, rank)):
                state = {"v": kind(fault)}
                try:
                    report = live.check(state, tag=f"{name} {turn}")
                except live.LiveError as error:
                    report = error.report
                said.append({(item.code, item.title.partition(": ")[2]) for item in report.diagnostics})
            healthy, faulty = said
            others = {code for code, _ in healthy} - {"LIV208", "LIV213"}
            if others:
                try:
                    dcp.save({"v": kind(0)}, checkpoint_id=tmp_path / str(number), no_dist=True)
                    wrong.append(f"{name}: {sorted(others)} of a healthy state that a save takes")
                except Exception:
                    continue
            is_named = any(code == "LIV213" and "v" in names for code, names in faulty)
            if not is_named and {code for code, _ in faulty} <= {"LIV208", "LIV213"}:
                wrong.append(f"{name}: its fault goes unsaid, {sorted(faulty)}")
        return len(all_kinds), wrong

    count, wrong = run_ranks(job, world=2, timeout=300)[0]
    assert count > 100 and not wrong, "\n".join(wrong)
