"""Single bits turned round in files of torch.save: does depth data see each that changes what torch loads?

    python bench/evidence/flips.py [--count 200] [--seed 0]

For each kind of file a real checkpoint is copied, and one random bit of the file is turned, again and again. What torch
reads of an archive (torch's own PyTorchFileReader: the names and bytes of all records) is compared with what it reads
of the whole file; where the two differ, `ckptlint check --depth data` must not pass. Prints one line for each kind:
flips, how many of them change what torch reads or keep it from reading, how many of those pass, and how many others are
told all the same (flips in checksums, dates and padding, of which torch sees nothing). The last kinds have no checksum:
there every flip counts, nothing but the format itself can tell one, and the line says so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint

import ckptlint

REAL = Path(__file__).parents[2] / "fixtures" / "real"
KINDS = {
    "DCP records": ("fsdp2_4r", "__1_0.distcp"),
    "Megatron common.pt": ("megatron_tp2_dp2_fully_reshardable/iter_0000010", "common.pt"),
    "Megatron records": ("megatron_tp2_dp2_fully_reshardable/iter_0000010", "__0_0.distcp"),
    "Megatron legacy": ("megatron_legacy/tp2/iter_0000010", "mp_rank_01/model_optim_rng.pt"),
    "Megatron legacy, distributed optimizer": (
        "megatron_legacy/tp2_dp2_distributed/iter_0000010",
        "mp_rank_00/distrib_optim.pt",
    ),
    "verl model": ("rank_files/verl_fsdp2_4r", "model_world_size_4_rank_1.pt"),
    "verl optimizer": ("rank_files/verl_fsdp2_4r", "optim_world_size_4_rank_2.pt"),
    "verl random state": ("rank_files/verl_fsdp2_4r", "extra_state_world_size_4_rank_3.pt"),
    "DeepSpeed model": ("deepspeed/z2_bf16_4r/global_step2", "mp_rank_00_model_states.pt"),
    "DeepSpeed optimizer": (
        "deepspeed/z2_bf16_4r/global_step2",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "DeepSpeed universal": ("deepspeed/universal_z1/global_step2_universal", "zero/embed.weight/exp_avg.pt"),
    "weights in several files": ("rank_files/sharded_bin", "pytorch_model-00002-of-00003.bin"),
    "Lightning": ("rank_files/lightning", "epoch=0-step=3.ckpt"),
    "accelerate optimizer": ("rank_files/accelerated", "optimizer.bin"),
    "Trainer arguments": ("deepspeed/trainer_z2_2r/checkpoint-2", "training_args.bin"),
    "Trainer random state": ("deepspeed/trainer_z2_2r/checkpoint-2", "rng_state_0.pth"),
}
BARE = {  # without a checksum
    "weights of torch < 1.6": ("rank_files/old_format", "pytorch_model.bin"),
    "a pickle by itself": ("objects", "python.pkl"),
    "safetensors": ("hf_sharded", "shard-00001-model-00001-of-00002.safetensors"),
    "JSON of a trainer": ("deepspeed/trainer_z2_2r/checkpoint-2", "trainer_state.json"),
}


def main() -> None:
    """Flip bits in every kind and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="flips in each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    print(f"{'kind':40}{'flips':>7}{'matter':>8}{'pass':>6}{'told besides':>14}")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        tasks = [(kind, options.count, options.seed) for kind in (*KINDS, *BARE)]
        for kind, matter, passed, besides in pool.imap(_flip, tasks):
            note = "no checksum" if kind in BARE else passed or ""
            print(f"{kind:40}{options.count:7}{matter:8}{len(passed):6}{besides:14}  {note}", flush=True)


def _flip(task: tuple[str, int, int]) -> tuple[str, int, list[int], int]:
    """How many flips matter, the bits of those that pass, and how many others are told."""
    kind, count, seed = task
    warnings.simplefilter("ignore")
    source, name = (KINDS | BARE)[kind]
    dice = random.Random(f"{kind} {seed}")
    matter, passed, besides = 0, [], 0
    with tempfile.TemporaryDirectory() as work:
        step = Path(shutil.copytree(REAL / source, Path(work) / "run" / Path(source).name))
        path = step / name
        before, held = path.read_bytes(), _read(step, path)
        assert held is not None and ckptlint.check(step, depth="data").exit_code == 0, kind
        for _ in range(count):
            bit = dice.randrange(8 * len(before))
            changed = bytearray(before)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            told = ckptlint.check(step, depth="data").exit_code != 0
            if _read(step, path) != held:
                matter += 1
                passed += [] if told else [bit]
            else:
                besides += told
    return kind, matter, passed, besides


def _read(step: Path, path: Path) -> list[dict[str, bytes]] | None:
    """The records of the archives of a file as torch reads them; None where it cannot."""
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        return [{"": data}]
    spans = [(0, len(data))]
    if path.suffix == ".distcp":
        stored = torch.distributed.checkpoint.FileSystemReader(step).read_metadata().storage_data.values()
        spans = sorted((info.offset, info.length) for info in stored if info.relative_path == path.name)
    found = []
    for start, length in spans:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data[start : start + length])
            file.flush()
            try:
                reader = torch._C.PyTorchFileReader(file.name)
                found.append({record: reader.get_record(record) for record in reader.get_all_records()})
            except (RuntimeError, UnicodeError):
                return None
    return found


if __name__ == "__main__":
    main()
