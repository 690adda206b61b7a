"""Kill -9 of real saves at every file operation, and what `ckptlint latest` says of the run afterwards.

Each save writes step-2 beside a finished step-1, in a process that strace ends with SIGKILL when it enters the n-th
call of one kind (open, write, rename, fsync, ...) on a file of step-2, for each kind and each n until the save comes to
its end. Then `latest` is asked; what it may answer is decided by loading step-2 with the library that wrote it: the
newer step where all its values come back, the older one in all other cases.

    python bench/evidence/kill_sweep.py [--only dcp] [--markdown]

Needs strace, torch; accelerate and megatron-core for the saves through them (others are named as left out).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptlint.commands.main import cli
from ckptlint.errors import CkptlintError

CALLS = (
    "openat,creat,mkdir,mkdirat,write,writev,pwrite64,ftruncate,rename,renameat,renameat2,fsync,fdatasync,close,unlink"
)
_PATIENCE = 60.0


def state(seed: int) -> dict[str, torch.Tensor]:
    """A model and its moments."""
    torch.manual_seed(seed)
    model = {f"layers.{i}.weight": torch.randn(512, 256) for i in range(4)} | {"norm.weight": torch.ones(256)}
    return model | {f"optimizer.state.{key}.exp_avg": torch.randn_like(value) for key, value in model.items()}


@dataclass(frozen=True)
class Save:
    """A way to save and to load again."""

    name: str
    save: Callable[[dict[str, torch.Tensor], Path], None]
    load: Callable[[Path], dict[str, torch.Tensor]]


def dcp_load(path: Path) -> dict[str, torch.Tensor]:
    into = {key: torch.zeros_like(value) for key, value in state(0).items()}
    dcp.load(into, checkpoint_id=path)
    return into


def dcp_save(values: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save(values, checkpoint_id=path)


def dcp_save_async(values: dict[str, torch.Tensor], path: Path) -> None:
    with single_process():
        dcp.async_save(values, checkpoint_id=path).result()


def safetensors_save(values: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file(values, path / "model.safetensors")


def safetensors_load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1 and not (path / "model.safetensors.index.json").exists():
        raise FileNotFoundError("transformers refuses several shards without an index")
    for file in files:
        found |= load_file(file)
    return found


def accelerate_save(values: dict[str, torch.Tensor], path: Path) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).save_model(module_of(values), path, max_shard_size="1200KB")


def module_of(values: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose state dict is these values."""
    module = torch.nn.Module()
    for key, value in values.items():
        *parts, last = key.split(".")
        at = module
        for part in parts:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = dict(at.named_children())[part]
        at.register_buffer(last, value)
    return module


@contextlib.contextmanager
def single_process():
    """A process group of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def megatron_state(values: dict[str, torch.Tensor]) -> dict[str, object]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}


@contextlib.contextmanager
def megatron_job():
    """One rank of megatron-core on the CPU, where there is no stream to wait for."""
    from megatron.core import parallel_state

    with single_process():
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def megatron_save(values: dict[str, torch.Tensor], path: Path) -> None:
    from megatron.core import dist_checkpointing

    with megatron_job():
        path.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save({**megatron_state(values), "iteration": int(path.name.split("_")[-1])}, str(path))


def megatron_save_async(values: dict[str, torch.Tensor], path: Path) -> None:
    from megatron.core import dist_checkpointing

    with megatron_job():
        path.mkdir(parents=True, exist_ok=True)
        everything = {**megatron_state(values), "iteration": int(path.name.split("_")[-1])}
        request = dist_checkpointing.save(everything, str(path), async_sharded_save=True)
        request.execute_sync()


def megatron_load(path: Path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    with megatron_job():
        into = {key: torch.zeros_like(value) for key, value in state(0).items()}
        loaded = dist_checkpointing.load(megatron_state(into), str(path))
    return {key: loaded[key] for key in into}


SAVES = (
    Save("torch dcp.save", dcp_save, dcp_load),
    Save("torch dcp.async_save", dcp_save_async, dcp_load),
    Save("safetensors save_file", safetensors_save, safetensors_load),
    Save("accelerate save_model, sharded", accelerate_save, safetensors_load),
    Save("megatron-core save", megatron_save, megatron_load),
    Save("megatron-core save, asynchronous", megatron_save_async, megatron_load),
)


@dataclass
class Tally:
    """What came of the kills of one kind of save.

    Attributes:
        killed: saves that were ended; refused: of these, steps that `latest` did not name; whole: steps that loaded in
            full although their save was killed; wrong: sentences on answers that were not right.
    """

    killed: int = 0
    refused: int = 0
    whole: int = 0
    wrong: list[str] = field(default_factory=list)


def in_child(work: Callable[[], None], kill: tuple[str, int, list[Path]] | None = None) -> int:
    """Run in a forked process, which strace kills at the n-th call of a kind on these files; its wait status.

    Where a worker of the process was killed, all of the job is: a node that dies takes every process with it.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            if not os.environ.get("SWEEP_ERRORS"):
                os.dup2(null, 2)
            if kill is not None:
                attach(*kill)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return status
        if kill is not None and has_dead_worker(child):
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)


def has_dead_worker(process: int) -> bool:
    """Whether a process that was started by this one, or by one of its own, waits to be buried."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" or has_dead_worker(int(child)):
                return True
    return False


def attach(call: str, number: int, files: list[Path]) -> None:
    """Let strace follow this process, and wait until it does."""
    filters = [item for file in files for item in ("-P", str(file))]
    inject = f"inject={call}:signal=KILL:when={number}"
    subprocess.Popen(
        [
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            f"trace={CALLS}",
            "-e",
            inject,
            *filters,
            "-p",
            str(os.getpid()),
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + _PATIENCE
    while "TracerPid:\t0" in Path("/proc/self/status").read_text():
        if time.monotonic() > until:
            raise RuntimeError("strace did not come")
        time.sleep(0.002)


def latest(run: Path) -> tuple[int, str]:
    """Exit code and answer of `ckptlint latest`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(["latest", "--isolated", str(run)], standalone_mode=False)
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue().strip()
        except CkptlintError:
            return 4, out.getvalue().strip()
    return 0, out.getvalue().strip()


def sweep(save: Save, folder: Path) -> Tally:
    """Kill a save at each of its file operations."""
    name = "iter_{:07d}" if "megatron" in save.name else "step-{}"
    run, new = folder / "run", folder / "run" / name.format(2)
    old = run / name.format(1)
    before, after = state(1), state(2)
    run.mkdir()
    assert in_child(lambda: save.save(before, old)) == 0, f"{save.name} does not save here"
    assert in_child(lambda: save.save(after, new)) == 0
    assert latest(run) == (0, str(new)), f"{save.name}: a finished step is not found"
    files = [new, *(path for path in new.rglob("*")), new / ".metadata.tmp"]
    tally = Tally()
    for call in CALLS.split(","):
        for number in range(1, 10_000):
            shutil.rmtree(new, ignore_errors=True)
            status = in_child(lambda: save.save(after, new), (call, number, files))
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
                break  # it came to its end: there is no such call any more
            if not os.WIFSIGNALED(status):
                tally.wrong.append(f"{call} {number}: the save ended in {status} without being killed")
                break
            tally.killed += 1
            is_whole = loads(save, new, after)
            code, answer = latest(run)
            tally.whole += is_whole
            if (code, answer) == (0, str(old)):
                tally.refused += 1
            elif not (is_whole and (code, answer) == (0, str(new))):
                tally.wrong.append(f"{call} {number}: exit {code}, {answer or 'no answer'}, loads: {is_whole}")
    return tally


def loads(save: Save, path: Path, wanted: dict[str, torch.Tensor]) -> bool:
    """Whether the library that wrote a step gives back all its values."""

    def work() -> None:
        found = save.load(path)
        if found.keys() != wanted.keys() or not all(torch.equal(found[key], wanted[key]) for key in wanted):
            raise ValueError("other values")

    return in_child(work) == 0


def load_megatron() -> None:
    """Import megatron-core and start its manager of queues once, not in each process that is killed."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    filesystem_async._get_write_results_queue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="saves whose names hold this text")
    parser.add_argument("--markdown", action="store_true")
    chosen = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not installed")
    torch.set_num_threads(1)
    rows, wrong = [], 0
    for save in SAVES:
        if chosen.only not in save.name:
            continue
        if "megatron" in save.name:
            load_megatron()
        with tempfile.TemporaryDirectory() as folder:
            try:
                tally = sweep(save, Path(folder))
            except AssertionError as error:
                rows.append((save.name, str(error), "", "", ""))
                continue
        print(f"{save.name}: {tally.killed} killed, {len(tally.wrong)} wrong answers", file=sys.stderr, flush=True)
        rows.append((save.name, tally.killed, tally.refused, tally.whole, len(tally.wrong)))
        wrong += len(tally.wrong)
        for sentence in tally.wrong:
            print(f"{save.name}: {sentence}", file=sys.stderr)
    from tabulate import tabulate

    heads = ("save", "killed", "older step named", "loads in full all the same", "wrong answers")
    print(tabulate(rows, heads, tablefmt="github" if chosen.markdown else "simple"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
