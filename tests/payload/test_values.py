"""Zeros, denormals, one value, least and largest magnitude: against torch; and PAY015 on saves of real libraries."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import codes, examples, found, run_python, swept

import ckptlint
from ckptlint.depth import Depth
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.payload import parts, stream
from ckptlint.payload.parts import join
from ckptlint.payload.reader import Reader, read_payload
from ckptlint.payload.reading import ReadOptions
from ckptlint.payload.values import RecordValues, values_of
from ckptlint.storage.local import LocalFolder
from ckptlint.vocabulary.dtypes import ENCODINGS, INTEGERS, ITEM_BITS

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")

NARROW = {"float16", "complex32"}
_UNSAMPLED = 5_000  # position of a number that no sample of many holds


def wanted(raw: bytes, dtype: str) -> tuple[object, ...]:
    """NaN, +Inf, -Inf, zeros, denormals, least, most and whether there is one value: as torch sees the bytes."""
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
    numbers = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    normal = torch.finfo(numbers.dtype).smallest_normal
    exact = numbers.to(torch.float32).to(torch.float64) if numbers.dtype != torch.float64 else numbers
    fine = exact[exact.isfinite()]
    sizes = fine.abs()
    is_narrow = dtype in NARROW or dtype.startswith("float8")
    return (
        int(exact.isnan().sum()), int((exact == inf).sum()), int((exact == -inf).sum()), int((fine == 0).sum()),
        0 if is_narrow else int(((sizes > 0) & (sizes < normal)).sum()), float(sizes.min()) if len(fine) else inf,
        float(sizes.max()) if len(fine) else -inf, len(fine) == len(exact) and bool((fine == fine[0]).all()),
    )  # fmt: skip


def finite(raw: bytes, dtype: str) -> Any:
    """float64, the finite numbers among the bytes as torch sees them."""
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
    numbers = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    exact = numbers.to(torch.float32).to(torch.float64) if numbers.dtype != torch.float64 else numbers
    return exact[exact.isfinite()]


def squares_but_most(raw: bytes, dtype: str) -> float:
    sizes = finite(raw, dtype).abs().sort().values[:-1]
    return float((sizes * sizes).sum())


def below_zero(raw: bytes, dtype: str) -> int:
    return int((finite(raw, dtype) < 0).sum())


def seen(values: RecordValues) -> tuple[object, ...]:
    """The same of what was found."""
    counted = (values.nan, values.plus_inf, values.minus_inf, values.zeros, values.denormals)
    return (*counted, values.least, values.most, values.one_value)


def special(dtype: str) -> list[bytes]:
    """Elements of one real number each at the borders: zeros, least and largest of each kind, what is not finite."""
    encoding = ENCODINGS[dtype]
    bits = np.dtype(encoding.word).itemsize * 8
    normal = 1 << encoding.mantissa
    near = [0, 1, normal - 1, normal, normal + 1, encoding.bad - 1, encoding.bad, encoding.bad + 1]
    both = [word | sign for word in near for sign in (0, 1 << (bits - 1))]
    return [(word % (1 << bits)).to_bytes(bits // 8, "little") * encoding.parts for word in both]


@pytest.mark.parametrize("dtype", sorted(ENCODINGS))
def test_every_number_is_seen_as_torch_sees_it(dtype: str) -> None:
    for element in special(dtype):
        assert seen(values_of(memoryview(element * 3), dtype, 0)) == wanted(element * 3, dtype), element.hex()


@pytest.mark.parametrize("dtype", sorted(INTEGERS))
def test_codes_are_whole_numbers_whose_bits_count(dtype: str) -> None:
    item = ITEM_BITS[dtype] // 8
    zero, one, last = bytes(item), (1).to_bytes(item, "little"), b"\xff" * item
    top = float(2 ** ITEM_BITS[dtype] - 1)
    mixed = values_of(memoryview(zero + one + zero + last), dtype, 0)
    assert seen(mixed) == (0, 0, 0, 2, 0, 0.0, top, False)
    assert (mixed.leading, mixed.trailing) == (1, 0)
    assert seen(values_of(memoryview(last * 3), dtype, 0)) == (0, 0, 0, 0, 0, top, top, True)
    assert seen(values_of(memoryview(zero * 3), dtype, 0)) == (0, 0, 0, 3, 0, 0.0, 0.0, True)


@pytest.mark.parametrize("dtype", sorted(ENCODINGS))
@settings(max_examples=examples(20, 120))
@given(data=st.data())
def test_parts_joined_are_the_whole(dtype: str, data: Any) -> None:
    item = ITEM_BITS[dtype] // 8
    element = st.sampled_from(special(dtype)) | st.binary(min_size=item, max_size=item)
    few = data.draw(st.lists(element, min_size=1, max_size=3))
    elements = data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(elements)), max_size=3)))
    joined = RecordValues()
    for start, stop in zip([0, *cuts], [*cuts, len(elements)], strict=True):
        joined.join(values_of(memoryview(b"".join(elements[start:stop])), dtype, start))
    raw = b"".join(elements)
    whole = values_of(memoryview(raw), dtype, 0)
    assert seen(joined) == seen(whole) == wanted(raw, dtype)
    assert (joined.first, joined.masks) == (whole.first, whole.masks)
    assert joined.used_bits == whole.used_bits
    assert joined.negatives == whole.negatives == below_zero(raw, dtype)
    slack = 1e-14 * max(whole.most, 0.0) ** 2 if whole.most < 1e150 else 0.0  # beside which float32 loses small squares
    assert joined.squares == pytest.approx(whole.squares, rel=1e-5, abs=slack)
    assert whole.squares == pytest.approx(squares_but_most(raw, dtype), rel=1e-5, abs=slack)
    if whole.first < 0:
        assert (joined.leading, joined.trailing) == (whole.leading, whole.trailing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sample_of_many_numbers_never_hides_a_rare_one(dtype: str) -> None:
    """One number below 0, one of 1e9 or one with low bits among many, where no sample looks; many below 0 nearly."""
    weights = torch.randn(300_000, generator=torch.Generator().manual_seed(7)).to(getattr(torch, dtype))
    seen = {}
    for name, (values, odd) in {
        "weights": (weights, None), "squares": (weights * weights, None), "one below 0": (weights * weights, -1e-3),
        "one of 1e9": (weights, 1e9), "rounded": (weights.bfloat16(), None), "one not": (weights.bfloat16(), 0.1),
    }.items():  # fmt: skip
        made = values.to(getattr(torch, dtype)).clone()
        made[_UNSAMPLED] = made[_UNSAMPLED] if odd is None else odd
        raw = made.view(torch.uint8).numpy().tobytes()
        seen[name] = values_of(memoryview(raw), dtype, 0)
        assert seen[name].negatives == pytest.approx(below_zero(raw, dtype), rel=0.02)
        assert seen[name].squares == pytest.approx(squares_but_most(raw, dtype), rel=0.1)
    assert (seen["squares"].negatives, seen["one below 0"].negatives) == (0, 1)
    if dtype == "float32":
        low = (1 << 16) - 1
        assert seen["rounded"].used_bits & low == 0
        assert seen["one not"].used_bits & low == int(np.float32(0.1).view(np.uint32)) & low


def save(state: dict[str, Any], folder: Path) -> Path:
    """A checkpoint of one process."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that are read at once: fewer than a user's, so that what spans several blocks is soon made."""
    for module in (stream, parts):
        monkeypatch.setattr(module, "BLOCK", 2**16)
    monkeypatch.setattr(stream, "_shift", stream._shift.__wrapped__)  # what it keeps is that of a block
    return 2**16


COLUMNS = ("nan", "plus_inf", "minus_inf", "zeros", "denormals", "least", "most", "one_value")


def columns(folder: Path, fqn: str, *shares: list[int]) -> tuple[object, ...]:
    """The columns of a key's only record; read by so many processes as there are shares."""
    ckpt = open_checkpoint(find(str(folder))[0])
    how = ReadOptions(Depth("data"), 2)
    if shares:
        readers = [
            Reader(LocalFolder(folder), ckpt, how, np.array(share), leads=share == shares[0]) for share in shares
        ]
        payload = join(LocalFolder(folder), ckpt, how, [reader.part() for reader in readers]).payload
    else:
        payload = read_payload(LocalFolder(folder), ckpt, how).payload
    assert payload is not None
    record = int(ckpt.tensors[fqn].chunks.record[0])
    return tuple(getattr(payload, column)[record].item() for column in COLUMNS)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("dtype", sorted(ENCODINGS))
def test_columns_agree_with_torch_across_blocks(dtype: str, block: int, tmp_path: Path) -> None:
    chance = np.random.default_rng(7)
    raw = chance.bytes(block + block // 2)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
    save({"small": torch.ones(8), "w": tensor.reshape(-1, 4)}, tmp_path)
    assert columns(tmp_path, "w") == wanted(raw, dtype)
    assert columns(tmp_path, "w", [0], [1]) == wanted(raw, dtype)


@pytest.mark.parametrize(
    ("fill", "changed", "one"),
    [(0.0, None, True), (0.5, None, True), (0.5, -0.5, False), (0.0, -0.0, True), (0.0, 1e-45, False)],
)
def test_one_value_ends_with_the_last_element_of_the_last_block(
    fill: float, changed: float | None, one: bool, block: int, tmp_path: Path
) -> None:
    tensor = torch.full((block // 2,), fill)
    if changed is not None:
        tensor[-1] = changed
    save({"w": tensor}, tmp_path)
    zeros = int((tensor == 0).sum())
    expected = (0, 0, 0, zeros, int(changed == 1e-45), tensor.abs().min().item(), tensor.abs().max().item(), one)
    assert columns(tmp_path, "w") == expected


# ---------------------------------------------------------------- PAY015 on real saves


def model(layers: int = 4) -> dict[str, Any]:
    """Weights of a small model, with what may be constant in a trained one."""
    made = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {"model.embed_tokens.weight": torch.randn(32, 16, generator=made)}
    for i in range(layers):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            state[f"model.layers.{i}.{name}.weight"] = torch.randn(16, 16, generator=made).to(torch.bfloat16)
            state[f"model.layers.{i}.{name}.bias"] = torch.zeros(16) if i else torch.ones(16)
        state[f"model.layers.{i}.norm.weight"] = torch.ones(16) * (1 + i)
    return state


def told(report: Any) -> list[tuple[str, str]]:
    """Severity and sentence of what PAY015 found; it is all that was found."""
    assert codes(report) <= {"PAY015"}, found(report)
    return [(level, text) for _, level, text in found(report)]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A safetensors file with weights of five layers, each of several pages."""
    made = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.{name}_proj.weight" for i in range(5) for name in ("self_attn.q", "mlp.up", "mlp.down")]
    state = {name: torch.randn(64, 96, generator=made).to(torch.bfloat16) for name in names}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(("pages", "hit"), [((5,), 1), ((8, 9, 10), 2), ((40, 41), 1)])
def test_pages_that_never_reached_the_disk(wide: Path, pages: tuple[int, ...], hit: int) -> None:
    assert told(ckptlint.check(wide, depth="data")) == []
    data = bytearray(wide.read_bytes())
    for page in pages:
        data[page * 4096 : (page + 1) * 4096] = bytes(4096)
    wide.write_bytes(data)
    said = told(ckptlint.check(wide, depth="data"))
    assert [level for level, _ in said] == ["warning"] * hit
    assert all("other weights of this name have next to none" in text for _, text in said)


@pytest.mark.parametrize(("layers", "level"), [((2,), ["info"] * 3), (range(5), [])])
def test_rows_that_were_pruned(wide: Path, layers: Any, level: list[str]) -> None:
    state = load_file(wide)
    for name, weight in state.items():
        if any(f".{layer}." in name for layer in layers):
            weight[20:50] = 0
    save_file(state, wide, {"format": "pt"})
    assert [level for level, _ in told(ckptlint.check(wide, depth="data"))] == level


def test_a_weight_of_zeros_in_a_dcp_save(tmp_path: Path) -> None:
    state = model()
    assert told(ckptlint.check(save(state, tmp_path / "good"), depth="data")) == []
    state["model.layers.2.mlp.up_proj.weight"].zero_()
    folder = save(state, tmp_path / "bad")
    sentence = "every value of model.layers.2.mlp.up_proj.weight is 0; other weights of this name hold several values"
    assert told(ckptlint.check(folder, depth="data")) == [("warning", sentence)]
    assert told(ckptlint.check(folder, depth="headers")) == []


def test_a_weight_of_one_value_in_a_safetensors_file(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = model()
    save_file(state, tmp_path / "model.safetensors")
    assert told(ckptlint.check(tmp_path, depth="data")) == []
    state["model.layers.0.self_attn.q_proj.weight"].fill_(0.25)
    save_file(state, tmp_path / "model.safetensors")
    sentence = (
        "every value of model.layers.0.self_attn.q_proj.weight is the same, 0.25 in magnitude; "
        "other weights of this name hold several values"
    )
    assert told(ckptlint.check(tmp_path, depth="data")) == [("warning", sentence)]


def test_fresh_models_and_steps_of_training_are_silent(tmp_path: Path) -> None:
    """Output projections start as zeros, and Adam moves them; experts and tokens that were not used stay."""
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.down_proj = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
            torch.nn.init.zeros_(self.down_proj.weight)

        def forward(self, x: Any) -> Any:
            return x + self.down_proj(self.up_proj(x).relu()) + self.experts[0](x)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(64, 16)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
            self.lm_head = torch.nn.Linear(16, 64, bias=False)
            torch.nn.init.zeros_(self.lm_head.weight)

        def forward(self, tokens: Any) -> Any:
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(x)

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(4):
        state = {"model": net.state_dict(), "optimizer": {"state": {}}}
        moments = {name: optimizer.state.get(p, {}) for name, p in net.named_parameters()}
        state["optimizer"]["state"] = {name: dict(moment) for name, moment in moments.items() if moment}
        report = ckptlint.check(save(state, tmp_path / f"step-{step}"), depth="data", select=["PAY015"])
        assert found(report) == [], step
        tokens = torch.randint(0, 40, (8, 4))
        loss = torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


SHARDED = """
import contextlib, os, signal, sys, torch, traceback
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

out, library = sys.argv[1:]

def weights(rank, damage):
    made = torch.Generator().manual_seed(rank)
    state = {}
    for i in range(3):
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"):
            state[f"decoder.layers.{i}.{name}.weight"] = torch.randn(16, 16, generator=made)
    zeroed = {"good": [], "shard": ["decoder.layers.1.mlp.linear_fc1.weight"] if rank else [],
              "weight": ["decoder.layers.1.mlp.linear_fc2.weight"], "rank": list(state) if rank else [],
              "padded": [k for k in state if "qkv" in k] if rank else []}[damage]
    for key in zeroed:
        state[key].zero_()
    return state

def work(rank):
    os.setpgid(0, 0)
    signal.alarm(120)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    if library == "megatron":
        torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: torch.device("cpu")
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing import ShardedTensor
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for damage in ("good", "shard", "weight", "rank", "padded"):
        folder = f"{out}/{damage}"
        os.makedirs(folder, exist_ok=True)
        state = weights(rank, damage)
        if library == "megatron":
            sharded = {k: ShardedTensor.from_rank_offsets(k, v, (0, rank, 2)) for k, v in state.items()}
            dist_checkpointing.save({**sharded, "iteration": 100}, folder)
        else:
            sharded = {k: DTensor.from_local(v, mesh, [Shard(0)]) for k, v in state.items()}
            dcp.save(sharded, checkpoint_id=folder)
    dist.barrier()
    os._exit(0)

if __name__ == "__main__":
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    for child in children:
        with contextlib.suppress(OSError):  # megatron-core leaves a process of its own behind
            os.killpg(child, signal.SIGKILL)
    assert not any(failed), failed
"""


@pytest.fixture(scope="module", params=[*swept("torch"), pytest.param("megatron", marks=pytest.mark.ci)])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of two ranks, by torch's DCP and by megatron-core: a good one, and some with zeros."""
    if request.param == "megatron":
        pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    done = run_python(SHARDED, folder, request.param, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def zeros(folder: Path) -> list[tuple[str, str]]:
    """Severity and sentence of what PAY015 finds in a save."""
    report = ckptlint.check(folder, depth="data", select=["PAY015"])
    assert report.unreadable == ()
    return [(level, text) for _, level, text in found(report)]


def test_shards_of_two_ranks(sharded: Path) -> None:
    assert zeros(sharded / "good") == []
    assert zeros(sharded / "padded") == []  # the same place of every layer, as padded heads
    shard = "chunk [16:32, 0:16] of decoder.layers.1.mlp.linear_fc1.weight holds only zeros, unlike its 1 other chunk"
    assert zeros(sharded / "shard") == [("error", shard)]
    weight = (
        "every value of decoder.layers.1.mlp.linear_fc2.weight is 0; other weights of this name hold several values"
    )
    assert zeros(sharded / "weight") == [("warning", weight)]
    rank = zeros(sharded / "rank")
    assert len(rank) == 9 and {level for level, _ in rank} == {"error"}
    assert all("chunk [16:32, 0:16] of" in text for _, text in rank)


def test_zeros_that_a_checksum_or_a_seal_tells_are_told_once(tmp_path: Path) -> None:
    folder = save(model(), tmp_path)
    ckpt = open_checkpoint(find(str(folder))[0])
    payload = read_payload(LocalFolder(folder), ckpt, ReadOptions(Depth("headers"), 2)).payload
    assert payload is not None
    record = int(ckpt.tensors["model.layers.2.mlp.up_proj.weight"].chunks.record[0])
    with (folder / ckpt.byte_range_of(record)[0]).open("r+b") as file:
        file.seek(int(payload.start[record]))
        file.write(bytes(int(payload.size[record])))
    assert codes(ckptlint.check(folder, depth="data")) == {"PAY012"}


@pytest.mark.parametrize(
    ("state", "value", "level"),
    [("exp_avg", float("nan"), "error"), ("exp_avg_sq", float("inf"), "warning"), ("step", float("nan"), "info")],
)
def test_the_values_of_an_optimizer_beside_a_model(tmp_path: Path, state: str, value: float, level: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert "PAY011" not in codes(ckptlint.check(tmp_path, depth="data"))
    saved = optimizer.state_dict()
    saved["state"][2][state].reshape(-1)[0] = value
    torch.save(saved, tmp_path / "optimizer.pt")
    values = [one for one in ckptlint.check(tmp_path, depth="data").diagnostics if one.code == "PAY011"]
    assert [(one.severity.label, one.finding.at.file) for one in values] == [(level, "optimizer.pt")]
    assert all(f"in {state} of parameter 2" in one.title for one in values)
    assert "PAY011" not in codes(ckptlint.check(tmp_path, depth="files"))
