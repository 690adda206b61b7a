"""Fuzzing of everything that reads untrusted bytes: coverage-guided mutants of the real fixture files.

    pip install atheris
    python bench/evidence/fuzz.py [TARGET...] [--seed 1] [--scale 1.0] [--found FOLDER]

Each target runs in a process of its own, as many times as its row in `TARGETS` says, and prints one row of the table
in docs/evidence.md. A mutant on which anything but an error of ckptlint's own is raised, which takes over 5 seconds
of processor time or 1 GiB of memory, ends its target; it is left in FOLDER.

In production a reader that CPython itself cannot protect from crafted input runs in a child process under limits
(`ckptlint.sandbox`). Here readers run in this process, where the fuzzer sees their branches. Mutants for which the
child is there (`needs_child`) are given to it.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

REAL = Path(__file__).resolve().parents[2] / "fixtures" / "real"
SECONDS = 5
MIB = 1024
SEED_LIMIT = 24_000
SEEDS = 60
MEMO_LIMIT = HASH_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """One reader.

    Attributes:
        run: gives it the bytes; raises on a bug alone.
        seeds: real files to start from.
        runs: executions.
        words: what a mutation may insert.
    """

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    runs: int
    words: tuple[str, ...] = ()


# ---------------------------------------------------------------- what the child process is there for


def needs_child(data: bytes) -> bool:
    """Whether CPython may starve on a pickle: a memo of gigabytes, or a tuple that takes hours to hash.

    A mutant is too short for the third danger, a tuple nested so deep that hashing it overflows the stack. In doubt
    the answer is yes. Single readers skip such a mutant, `tests/formats/test_safety.py` has its kind; whole checks fork
    for it.
    """
    weights: list[Any] = []
    memo: dict[int, Any] = {}
    mark = object()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            inner = argument.encode("latin-1", "ignore") if isinstance(argument, str) else argument
            if isinstance(inner, bytes) and inner[:1] == b"\x80" and needs_child(inner):  # read by the same reader
                return True
            operands = _pop(weights, opcode, mark)
            if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                slot = len(memo) if name == "MEMOIZE" else argument
                if slot > MEMO_LIMIT:
                    return True
                memo[slot] = weights[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                weights.append(memo.get(argument, 1))
            elif name == "DUP":
                weights.append(weights[-1])
            elif name == "MARK":
                weights.append(mark)
            elif opcode.stack_after and name not in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD", "ADDITEMS"):
                weights.append(1 + sum(weight for weight in operands if weight is not mark))
                if weights[-1] > HASH_LIMIT:
                    return True
    except ValueError as error:  # of names that are no ASCII or hold a backslash, the unpickler reads on
        return not re.search("exhausted|unknown|remain|not enough|no newline", str(error))
    except (IndexError, StopIteration):
        pass  # there the unpickler stops too
    return False


def _pop(stack: list[Any], opcode: pickletools.OpcodeInfo, mark: object) -> list[Any]:
    """Take an opcode's operands off the symbolic stack, the deepest first; those it leaves in place stay."""
    if opcode.name in ("MARK", "DUP", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"):
        return []
    before = opcode.stack_before
    if pickletools.markobject in before:
        at = len(stack) - 1 - next(i for i, item in enumerate(reversed(stack)) if item is mark)
        items = stack[at + 1 :]
        del stack[at:]
        return items
    count = len(before) - (opcode.name in ("APPEND", "SETITEM", "BUILD"))
    operands = stack[len(stack) - count :] if count else []
    del stack[len(stack) - count :]
    return operands


def merges(data: bytes) -> bool:
    """Whether a YAML document merges aliases, which doubles a mapping each time."""
    return b"<<" in data and b"*" in data


@contextmanager
def in_this_process(is_safe: bool) -> Iterator[None]:
    """Readers do not fork, so that the fuzzer sees which branches they take."""
    from ckptlint.loaders import checkpoint, reference
    from ckptlint.payload.archives import record_pickle as content
    from ckptlint.sandbox import isolated

    modules: tuple[Any, ...] = (checkpoint, content, reference)
    for module in modules:
        module.isolated = (lambda work, size: work()) if is_safe else isolated
    try:
        yield
    finally:
        for module in modules:
            module.isolated = isolated


# ---------------------------------------------------------------- single readers


def metadata(data: bytes) -> None:
    """Every name of `.metadata` is inert, and the numpy reader of large files says what the unpickler says."""
    from ckptlint.errors import CkptlintError
    from ckptlint.formats.pickles import safe_pickle as unpickle

    if needs_child(data):
        return
    said: list[Any] = []
    for worthwhile in (1 << 62, 0):
        unpickle.WORTHWHILE = worthwhile
        try:
            said.append(described(unpickle.read_metadata(data)))
        except CkptlintError as error:
            said.append(str(error))
    if said[0] != said[1]:
        raise AssertionError(f"two readers, two answers: {said}")


def described(found: Any) -> Any:
    """What the loader makes of a root, comparable."""
    from ckptlint.errors import UnreadableError
    from ckptlint.loaders.readers.dcp.metadata import describe

    if found.root is None:
        return found.refused
    try:
        made = describe([found.root], ".metadata")
    except UnreadableError as error:
        return found.refused, str(error)
    tensors = [
        (t.fqn, t.dtype, t.global_shape, t.tiling.offsets.tolist(), t.tiling.sizes.tolist(), t.chunks.record.tolist())
        for t in made.tensors.values()
    ]
    table = made.records
    columns = [column.tolist() for column in (table.file, table.byte_offset, table.byte_length)]
    return found.refused, tensors, columns, made.paths, [str(problem) for problem in made.problems]


def state(data: bytes) -> None:
    """The `data.pkl` of a record or of the common state."""
    from ckptlint.errors import CkptlintError
    from ckptlint.formats.pickles.safe_pickle import read_state
    from ckptlint.payload.archives.record_pickle import root_content
    from ckptlint.vocabulary.config_fields import read_declared

    if needs_child(data):
        return
    with suppress(CkptlintError):
        found = read_state(data)
        root_content(found.root)
        read_declared([("args", found.root)])


_GADGETS = [
    "os system",
    "posix mkdir",
    "subprocess Popen",
    "builtins eval",
    "builtins exec",
    "builtins open",
    "builtins __import__",
    "_io FileIO",
    "importlib import_module",
    "runpy run_path",
    "uuid _get_command_stdout",
    "enum reduce",
    "functools reduce",
    "pickle loads",
    "numpy save",
    "numpy.dtypes __loader__.set_data",
    "numpy.core.multiarray os.system",
    "torch load",
    "torch hub.load",
    "torch._C PyTorchFileWriter",
    "torch._utils sys.modules",
    "megatron.core.transformer.spec_utils import_module",
    "megatron.core.dist_checkpointing.strategies.torch os.system",
    "yaml unsafe_load",
    "sympy.core.sympify sympify",
]


def calls(data: bytes) -> None:
    """A stream that calls a gadget in the way that the bytes choose: told or unreadable, and nothing is touched."""
    from ckptlint.errors import CkptlintError
    from ckptlint.formats.pickles.safe_pickle import read_state

    stream = gadget(data)
    _watch()
    _WATCHING.append(True)
    try:
        found = read_state(stream)
    except CkptlintError:
        return
    finally:
        _WATCHING.clear()
    assert found.refused, stream


def gadget(data: bytes) -> bytes:
    """A pickle around a call: which name, in which way and how deep inside bytes say the first four bytes."""
    name, way, depth, protocol, *rest = data.ljust(4, b"\0")
    module, _, name_ = _GADGETS[name % len(_GADGETS)].partition(" ")
    target = pickle.GLOBAL + f"{module}\n{name_}\n".encode()
    if protocol % 2:
        target = pickled(module) + pickled(name_) + pickle.STACK_GLOBAL
    argument = pickled(bytes(rest).decode("latin-1"))
    one = argument + pickle.TUPLE1
    higher = (("torch._tensor", "_rebuild_from_type_v2"), ("copyreg", "_reconstructor"), ("functools", "reduce"))
    outer = [pickle.GLOBAL + f"{a}\n{b}\n".encode() + pickle.MARK for a, b in higher]
    ways = (
        target + one + pickle.REDUCE,
        pickle.MARK + target + argument + pickle.OBJ,
        pickle.MARK + argument + pickle.INST + f"{module}\n{name_}\n".encode(),
        target + argument + pickle.TUPLE1 + pickle.REDUCE + one + pickle.REDUCE,
        outer[0] + target + pickle.NONE + one + pickle.EMPTY_DICT + pickle.TUPLE + pickle.REDUCE,
        outer[1] + target + target + argument + pickle.TUPLE + pickle.REDUCE,
        outer[2] + target + argument + pickle.TUPLE + pickle.REDUCE,
        pickle.EMPTY_DICT + argument + target + one + pickle.REDUCE + pickle.SETITEM,
    )
    made = pickle.PROTO + b"\4" + ways[way % len(ways)] + pickle.STOP
    for _ in range(depth % 4):
        inner = pickle.BINBYTES + len(made).to_bytes(4, "little") + made + pickle.TUPLE1
        made = pickle.PROTO + b"\4" + pickle.GLOBAL + b"torch.storage\n_load_from_bytes\n" + inner + b"R."
    return made


def pickled(value: str) -> bytes:
    """The opcode that pushes a text."""
    text = value.encode()
    return pickle.BINUNICODE + len(text).to_bytes(4, "little") + text


_WATCHING: list[bool] = []


@cache
def _watch() -> None:
    """From now on importing, opening or running anything while `_WATCHING` holds something is an error."""
    from ckptlint.formats.pickles.safe_pickle import read_state

    for stream in (pickle.dumps({"what the reader itself imports and compiles": b""}, 4), gadget(b"\0\0\2")):
        read_state(stream)

    def seen(event: str, arguments: tuple[Any, ...]) -> None:
        if _WATCHING and event.split(".")[0] in ("import", "open", "exec", "compile", "os", "subprocess", "ctypes"):
            raise AssertionError(f"{event} {arguments!r} while a pickle was read")

    sys.addaudithook(seen)


def choices() -> Iterator[bytes]:
    """Every way to call, for some names."""
    for name in range(0, len(_GADGETS), 4):
        for way in range(8):
            yield bytes([name + way % 4, way, name % 3, way]) + b"id"


def archive(data: bytes) -> None:
    """A record: the strict reader of its directory, and the reader of the common state."""
    from ckptlint.errors import CkptlintError
    from ckptlint.formats.torch_archive import ranges_in, read_archive
    from ckptlint.payload.archives.record_headers import RecordPlace, read_headers

    folder = scratch("archive")
    (folder.path / "f").write_bytes(data)
    for found in read_headers(folder, "f", [RecordPlace(0, 0, len(data))]):
        for record in found.records:
            assert all(0 <= part.start <= part.start + part.size <= len(data) for part in record.parts)
    with suppress(CkptlintError):
        read_archive(ranges_in(data), len(data))


def header(data: bytes) -> None:
    """A safetensors file: what is taken without a fault tiles the file."""
    from ckptlint.errors import CkptlintError
    from ckptlint.formats.safetensors_header import header_length, layout_faults, parse_header

    with suppress(CkptlintError):
        length = header_length(data[:64], len(data))
        found = parse_header(data[8 : 8 + length], 8 + length)
        if not layout_faults(found, len(data)):
            assert int((found.end - found.begin).sum()) >= len(data) - found.payload


def keys(data: bytes) -> None:
    """Names of tensors taken apart, and folded into as few as possible."""
    from ckptlint.analysis.optimizer.inventory import dp_group, optimizer_parts, split_state
    from ckptlint.model import text
    from ckptlint.vocabulary import keys as names

    found = [part for part in data.decode("utf-8", "surrogateescape").split("\n") if part]
    for name in found:
        key = names.parse(name)
        assert key.fqn == name
        names.role(name)
        names.numbers_in(name)
        if key.kind == "optimizer":
            split_state(optimizer_parts(key)[1])
        dp_group(name)
    names.parse.cache_clear()
    assert len(text.fold_names(found)) <= len(found)


def yaml(data: bytes) -> None:
    """A run_config.yaml that a job left beside its checkpoint."""
    from ckptlint.loaders.readers.common_state import read_configs

    if not merges(data):
        folder = scratch("yaml")
        (folder.path / "run_config.yaml").write_bytes(data)
        read_configs(folder, None)


def toml(data: bytes) -> None:
    """A settings file, and the rules as it sets them."""
    from ckptlint.errors import ConfigError
    from ckptlint.lint.settings import files as settings_file

    file = scratch("toml").path / "ckptlint.toml"
    file.write_bytes(data)
    with suppress(ConfigError):
        found = settings_file.read_settings(str(file))
        found.fail_on  # noqa: B018
        settings_file.key_ignores(found, rules())


def baseline(data: bytes) -> None:
    """An earlier JSON report."""
    from ckptlint.errors import ConfigError
    from ckptlint.lint.settings.ignores import read_baseline

    file = scratch("baseline").path / "report.json"
    file.write_bytes(data)
    with suppress(ConfigError):
        read_baseline(str(file))


def expected(name: str, data: bytes) -> None:
    """A file for `--expect`."""
    from ckptlint.errors import ConfigError
    from ckptlint.loaders.reference import read_reference

    folder = scratch(f"expect-{name}")
    if name.endswith(".index.json") and not (folder.path / "a.safetensors").exists():
        (folder.path / "a.safetensors").write_bytes(next(safetensors_files()))
    (folder.path / name).write_bytes(data)
    with in_this_process(True), suppress(ConfigError):
        read_reference(str(folder.path / name))


# ---------------------------------------------------------------- whole checks


def check(base: str, name: str, depth: str, data: bytes) -> None:
    """A real checkpoint with one file replaced, from the path to the report in every format."""
    from ckptlint.depth import Depth
    from ckptlint.lint.run import run
    from ckptlint.lint.settings.request import Request
    from ckptlint.payload.reading import default_reading
    from ckptlint.reporters import REPORTERS
    from ckptlint.reporters.style import Style

    folder = scratch(f"{Path(base).parts[0]}-{name}").path / Path(base).name
    if not folder.exists():
        shutil.copytree(REAL / base, folder)
    (folder / name).write_bytes(data)
    inner = b"".join(pickles(data)) if name.endswith((".pt", ".distcp")) else data
    with in_this_process(not (merges(data) if name.endswith(".yaml") else needs_child(inner))):
        reading = default_reading(Depth(depth)) if depth == "data" else None
        report = run(Request((str(folder),), (*rules(),), Depth(depth), reading=reading))
    crashed = [item.finding.message for item in report.diagnostics if item.code == "LNT002"]
    assert not crashed, crashed
    assert not report.unreadable, report.unreadable
    assert (report.verdict == "pass") == (report.exit_code == 0)
    formats = sorted(REPORTERS)
    for format_ in ("full", formats[zlib.crc32(data) % len(formats)]):
        text = REPORTERS[format_](report, Style())
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)


@cache
def rules() -> tuple[Any, ...]:
    """Every rule of the catalogue."""
    from ckptlint.lint.registry import load_rules

    return tuple(load_rules())


@cache
def scratch(name: str) -> Any:
    """A folder of this process in memory; its listing is not kept."""
    from ckptlint.storage.local import LocalFolder

    class Fresh(LocalFolder):
        entries = property(LocalFolder.entries.func)  # type: ignore[assignment]

    root = tempfile.mkdtemp(prefix=f"{name}-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    return Fresh(Path(root))


# ---------------------------------------------------------------- seeds


def files(*patterns: str) -> Iterator[bytes]:
    """Real files, the small ones."""
    paths = sorted({path for pattern in patterns for path in REAL.rglob(pattern)})
    small = [path for path in paths if path.is_file() and 0 < path.stat().st_size <= SEED_LIMIT]
    for path in small[:: -(-len(small) // SEEDS) or 1]:
        yield path.read_bytes()


def records() -> Iterator[bytes]:
    """Archives that torch.save made: records cut out of payload files at their end records, and common states."""
    for data in files("*.distcp"):
        start = 0
        while data[start : start + 4] == b"PK\x03\x04" and (end := data.find(b"PK\x05\x06", start)) > 0:
            yield data[start : end + 22]
            start = end + 22
            break  # one of each file is enough
    yield from files("common.pt")


def pickles(data: bytes) -> Iterator[bytes]:
    """What looks like a pickle inside an archive: from a PROTO opcode to the next member."""
    for match in re.finditer(rb"\x80[\x02-\x05]", data):
        stop = data.find(b"PK", match.start())
        yield data[match.start() : stop if stop > 0 else len(data)]


def states() -> Iterator[bytes]:
    """The pickles of records."""
    return (next(pickles(data)) for data in records() if any(pickles(data)))


def safetensors_files() -> Iterator[bytes]:
    """Headers of real files, with as many bytes behind them as they ask for where these are few."""
    return files("*.safetensors")


def names() -> Iterator[bytes]:
    """The keys of real checkpoints, some to a seed."""
    import ckptlint

    for path in sorted(REAL.rglob(".metadata"))[::16]:
        if tensors := ckptlint.load(path.parent).tensors:
            yield "\n".join([*tensors][:12]).encode()


def texts(*documents: str) -> Callable[[], Iterator[bytes]]:
    """Documents written by hand, of formats that no real checkpoint here holds."""
    return lambda: (document.encode() for document in documents)


def reports() -> Iterator[bytes]:
    """JSON reports on real checkpoints."""
    import ckptlint
    from ckptlint.reporters import REPORTERS
    from ckptlint.reporters.style import Style

    for name in ("edit_base", "gap_middle", "metadata_malicious"):
        yield REPORTERS["json"](ckptlint.check(REAL / name), Style()).encode()


def manifests() -> Iterator[bytes]:
    """Manifests of real checkpoints."""
    import ckptlint
    from ckptlint.loaders.reference import manifest_text

    for name in ("edit_base", "plain_dtypes", "hf_sharded"):
        yield manifest_text([ckptlint.load(REAL / name)]).encode()


_MEGATRON = "megatron_edit_base/iter_0000010"
_JSON = ("{", "}", "[", "]", ":", "null", "true", "1e999", "-1", "9007199254740993", '""', "\\ud800", "NaN")
_YAML_WORDS = (
    "!!bool ",
    "!!int ",
    "!!float ",
    "!!timestamp ",
    "!!binary ",
    "!!set ",
    "!!omap ",
    "!!python/object:a.b ",
)
_YAML = """\
model: &m
  num_layers: 2
  hidden_size: 1_024
  swiglu: yes
  init: !!python/object/apply:torch.nn.init.normal_ [0.0, 0x10, .inf, 2001-12-14t21:59:43.10-05:00]
checkpoint: {save: /a, fully_parallel_save: true, rng: ~}
more: *m
bits: !!binary aGVsbG8=
when: 2001-12-14
time: 190:20:30
"""
_TOML = """\
select = ["GEO", "PAY"]
strict = true
baseline = "old.json"
output = ["json=report.json", "report.html"]
severity = { PAY006 = "info" }
plugins = ["my.rules"]
[rules.unreferenced-bytes]
min-bytes = 128
[per-key-ignores."model.*.w"]
rules = ["GEO004"]
reason = "known"
"""
_INDEX = '{"metadata": {"total_size": 64}, "weight_map": {"a": "a.safetensors", "b.0.w": "b.safetensors"}}'
_CONFIG = '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "text_config": {"vocab_size": 32}}'
_TORCH_DIST = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}'
_INTEGRITY = '{"algorithm": "sha256", "files": {"__0_0.distcp": "00", "common.pt": "11"}}'

TARGETS: dict[str, Target] = {
    "keys": Target(keys, names, 250_000, ("layers.", "experts.", "weight0", "chained_0.", "_extra_state/", "0")),
    "safetensors": Target(header, safetensors_files, 400_000, (*_JSON, "data_offsets", "shape", "dtype", "F8_E4M3")),
    "archive": Target(archive, records, 150_000, ("PK\x01\x02", "PK\x03\x04", "PK\x05\x06", "PK\x06\x06")),
    "state": Target(state, states, 150_000),
    "calls": Target(calls, choices, 150_000),
    "metadata": Target(metadata, partial(files, ".metadata", "__*.metadata"), 30_000),
    "baseline": Target(baseline, reports, 100_000, _JSON),
    "manifest": Target(partial(expected, "good.json"), manifests, 100_000, _JSON),
    "index": Target(partial(expected, "model.safetensors.index.json"), texts(_INDEX), 60_000, _JSON),
    "config.json": Target(partial(expected, "config.json"), texts(_CONFIG), 30_000, _JSON),
    "yaml": Target(yaml, texts(_YAML), 40_000, (*_YAML_WORDS, "&a ", "*a", "? ", "- ", "| ", "%YAML ")),
    "toml": Target(toml, texts(_TOML), 100_000, ("[[", "'''", "inf", "0x", "1979-05-27T07:32:00Z", "{", "[rules.")),
    "check .metadata": Target(partial(check, "edit_base", ".metadata", "files"), partial(files, ".metadata"), 1_000),
    "check torch_dist": Target(partial(check, _MEGATRON, ".metadata", "files"), partial(files, ".metadata"), 1_000),
    "check common.pt": Target(partial(check, _MEGATRON, "common.pt", "files"), partial(files, "common.pt"), 1_000),
    "check payload": Target(partial(check, "edit_base", "__0_0.distcp", "data"), partial(files, "__0_0.distcp"), 1_000),
    "check safetensors": Target(
        partial(check, "hf_sharded", "shard-00001-model-00001-of-00002.safetensors", "data"), safetensors_files, 1_000
    ),
    "check config.json": Target(partial(check, "edit_base", "config.json", "files"), texts(_CONFIG), 1_000, _JSON),
    "check run_config": Target(partial(check, _MEGATRON, "run_config.yaml", "files"), texts(_YAML), 1_000, _YAML_WORDS),
    "check metadata.json": Target(
        partial(check, _MEGATRON, "metadata.json", "files"), texts(_TORCH_DIST), 1_000, _JSON
    ),
    "check integrity": Target(partial(check, _MEGATRON, "integrity.json", "data"), texts(_INTEGRITY), 1_000, _JSON),
}


# ---------------------------------------------------------------- running


def fuzz(name: str, runs: int, seed: int, found: Path) -> None:
    """Run one target in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["ckptlint", "tomllib", "yaml"]):
        import tomllib  # noqa: F401

        import yaml as _  # noqa: F401

        rules()
    target = TARGETS[name]
    work = Path(tempfile.mkdtemp())
    for number, data in enumerate(target.seeds()):
        (work / f"seed-{number}").write_bytes(data)
    words = work.with_suffix(".words")
    escaped = ("".join(f"\\x{byte:02x}" for byte in word.encode("utf-8")) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in escaped))

    def one(data: bytes) -> None:
        start = time.process_time()
        target.run(data)
        assert time.process_time() - start < SECONDS, "it takes too long"

    resource.setrlimit(resource.RLIMIT_AS, (8 * MIB * 2**20, resource.RLIM_INFINITY))
    options = [f"-runs={runs}", f"-seed={seed}", f"-artifact_prefix={found}/", f"-rss_limit_mb={MIB}"]
    options += [f"-max_len={SEED_LIMIT}", "-timeout=300", "-report_slow_units=300", "-print_final_stats=1"]
    if target.words:
        options.append(f"-dict={words}")
    atheris.Setup([sys.argv[0], *options, str(work)], one)
    atheris.Fuzz()


def run(name: str, seed: int, scale: float, found: Path) -> bool:
    """Run one target in a process of its own and print its row; False when it found something."""
    folder = found / re.sub(r"\W+", "-", name)
    folder.mkdir(parents=True, exist_ok=True)
    before = {path.name for path in folder.iterdir()}
    runs = int(TARGETS[name].runs * scale)
    start = time.monotonic()
    own = [sys.executable, __file__, name, "--seed", str(seed), "--one", str(runs), "--found", str(folder)]
    done = subprocess.run(own, capture_output=True, text=True, errors="replace")
    seconds = time.monotonic() - start
    (folder / "log").write_text(done.stdout + done.stderr)
    counted = re.search(r"number_of_executed_units: +(\d+)", done.stderr)
    peak = re.search(r"peak_rss_mb: +(\d+)", done.stderr)
    left = {path.name for path in folder.iterdir()} - before - {"log"}
    told = ", ".join(sorted(left)) if left else "none" if done.returncode == 0 else f"exit {done.returncode}"
    cells = (name, f"{int(counted[1]):,}" if counted else "?", seed, f"{seconds:.0f}", peak[1] if peak else "?", told)
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return done.returncode == 0 and not left


def main() -> None:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="times the executions of TARGETS")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return fuzz(arguments.target[0], arguments.one, arguments.seed, arguments.found)
    print("| target | executions | seed | seconds | peak MiB | found |")
    print("|---|---|---|---|---|---|")
    names = arguments.target or TARGETS
    results = [run(name, arguments.seed, arguments.scale, arguments.found) for name in names]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
