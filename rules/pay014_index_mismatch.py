from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Literal

import numpy as np

from ckptlint.analysis.fit.judgement import explains_bytes, has_known_config
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, RecordState, WeightIndex
from ckptlint.model.text import first_names, fold_names, human_bytes, numbered, plural, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import MOST_KEYS, Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.config_fields import MODEL_CONFIG
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.keys import parse

_NUMBERS = lazy_pattern(r".*?([0-9]{1,9})-of-([0-9]{1,9})(?:\.[^-]+)?\.(?:safetensors|bin)")
_STATE = lazy_pattern(r"(?:state\.)?(\d+)\..+")
_SHOWN = 6
_MOST = 100_000
_SLACK = 0.01

KeysByFile = dict[str, dict[str, int]]
"""File -> key in its header -> its record."""


@rule("PAY014", "index-mismatch", Severity.ERROR, needs=("export",))
def index_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The index of a model does not match its files, or one of the files is missing.

    What it checks:
        Each key of `*.safetensors.index.json` or `*.bin.index.json` lies in the file that the index names, and no file
        `model-<k>-of-<N>.safetensors` is missing or without an entry. Nor do several numbered files lie beside a
        `config.json` without an index. Where two files of the index hold a key, transformers and vLLM load the copy
        of the last in sorted order: an error if the index names another and the copies differ in shape or dtype. These
        are only warnings: copies that differ in values or were not read, a key that the index does not list or that a
        file outside of it holds too, numbered files alone without an index, a missing number beside an index or among
        the shards of torch's writer, a stale index (none of its files is there, but `model.safetensors` is), and a
        `total_size` more than 1 % off (info if less, or if tied weights explain it). Copies with equal bytes (depth
        `data`), and old ones that no loader keeps, are info. If the configuration explains `total_size`, CFG001 and
        CFG005 report it. The index of ColossalAI's optimizer has the numbers of parameters for keys: all states of a
        parameter lie in the file that it names.
    Why it matters:
        A loader that follows the index misses tensors; one that reads every file loads stale ones.
    Usual causes:
        An interrupted upload or download, the index of another export, or a map of keys that was built on one rank.
    How to fix:
        Copy the missing file again, or write the index again from the files' headers.
    See:
        huggingface_hub.split_torch_state_dict_into_shards
    """
    names, stored_keys = ckpt.records.fqns, defaultdict[str, dict[str, int]](dict)
    files = list(ckpt.files.names)
    by_parameter = ckpt.index is not None and all(map(str.isdecimal, ckpt.index.places))
    for row, (key, file) in enumerate(zip(ckpt.records.fqn.tolist(), ckpt.records.file.tolist(), strict=True)):
        state = _STATE.fullmatch(names[key]) if by_parameter else None
        stored_keys[files[file]][state[1] if state else names[key]] = row
    if ckpt.index is not None and ckpt.index.is_stale:
        yield _stale(ckpt.index, files[0], stored_keys[files[0]].keys())
    elif ckpt.index is not None:
        instead = {files[row]: sentence for row, sentence in ckpt.files.instead.items()}
        yield from _misplaced(ckpt.index, stored_keys, instead)
        yield from _unlisted(ckpt, ckpt.index, stored_keys)
        yield from _double(ckpt, ckpt.index, stored_keys)
        yield from _total_size(ckpt, ckpt.index)
    elif ckpt.format in ("safetensors", "torch") and len(ckpt.files) > 1:
        yield from _without_index(ckpt, stored_keys)
    yield from _missing_numbers(ckpt)


def _stale(index: WeightIndex, whole: str, present: Set[str]) -> Finding:
    """The finding on an index of an earlier save in several files, beside this save's single file."""
    lost = sorted(index.places.keys() - present)
    return Finding(
        f"{index.file} is stale: none of the {plural(len({*index.places.values()}), 'file')} that it names is there, "
        f"and {whole} is loaded instead",
        at=Location(file=index.file),
        identity=("stale",),
        kind="stale",
        severity=Severity.WARNING,
        notes=tuple(("lacking", f"{whole} does not hold {text}") for _, text in _key_note(lost) if lost),
        why=f"transformers never opens it beside {whole}; a loader that follows the index finds none of its files",
        hint=f"delete {index.file}, unless {whole} is the older save: then copy the files of the index here again",
    )


def _misplaced(index: WeightIndex, stored_keys: KeysByFile, instead: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on keys that are not in the file that the index names, and on what is there `instead` of a file."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for key, file in index.places.items():
        wanted[file].add(key)
    files_of_key = _files_by_key(stored_keys)
    for file, keys in wanted.items():
        lost = sorted(keys - stored_keys.get(file, {}).keys())
        if not lost or (file in index.unread and file not in index.absent):
            continue  # a file whose header cannot be read has a finding of its own
        is_absent = file in index.absent
        homes = sorted({home for key in lost for home in files_of_key.get(key, ())})
        is_stored = all(key in files_of_key for key in lost)
        present = stored_keys.get(file, {}).keys()
        is_moved = bool(present) and any(present == others for name, others in wanted.items() if name != file)
        names = ", ".join(homes[:_SHOWN])
        yield Finding(
            f"{file} is missing: {index.file} places {_keys_text(lost)} in it"
            if is_absent
            else f"{index.file} places {_keys_text(lost)} in {file}, which does not hold "
            f"{'it' if len(lost) == 1 else 'them'}",
            at=Location(file=file, label=f"{index.file}: {file}"),
            identity=(file, *lost[:MOST_KEYS]),
            keys=tuple(lost[:MOST_KEYS]),
            notes=_key_note(lost),
            why="a loader that follows the index does not find these tensors"
            if is_stored
            else "no tensor in a missing file can be loaded"
            if is_absent
            else "",
            hint=f"swap back files that changed places: what the index places here lies in {names}"
            if is_moved and homes
            else f"write the index again from the headers: {'it lies' if len(lost) == 1 else 'they lie'} in {names}"
            if homes
            else instead.get(file) or "copy the file again from where the model was written",
            group="absent" if is_absent else "lacking",
            kind="lacking" if not is_absent else "elsewhere" if is_stored else "absent",
        )


def _files_by_key(stored_keys: KeysByFile) -> dict[str, list[str]]:
    return grouped((key, file) for file, present in stored_keys.items() for key in present)


def _unlisted(ckpt: Checkpoint, index: WeightIndex, stored_keys: KeysByFile) -> Iterator[Finding]:
    named = set(index.places.values())
    series = {match[2] for match in map(_NUMBERS.fullmatch, named) if match}
    blocks = {parse(key).block for key in index.places} - {""}
    for file, present in stored_keys.items():
        lacking = sorted(key for key in present if key not in index.places)  # a difference walks through all
        if lacking:
            of_model = [] if file in named else [key for key in map(parse, lacking) if key.block in blocks]
            is_all = len(of_model) == len(lacking)
            layers = {key.layer for key in of_model if is_all and key.layer is not None}
            # without its own layers the model is not loaded; those for multi-token prediction come behind them
            count = ckpt.declared["layers"].value if layers and "layers" in ckpt.declared else 0
            is_needed = isinstance(count, int) and any(layer < count for layer in layers)
            them = "it" if len(lacking) == 1 else "them"
            number = _NUMBERS.fullmatch(file)
            is_left_out = number is not None and number[2] in series and file not in named
            which = f" of this model ({numbered('layer', layers)})" if layers else ""
            yield Finding(
                f"{file} holds {_keys_text(lacking)}{which} that {index.file} does not list",
                at=Location(file=file),
                identity=(file, *lacking[:MOST_KEYS]),
                keys=tuple(lacking[:MOST_KEYS]),
                severity=None if is_needed or is_left_out else Severity.WARNING,
                notes=_key_note(lacking),
                why="a loader that follows the index never reads them, one that takes every file does",
                hint="write the index again from the headers"
                if file in named
                else f"add {them} to weight_map of {index.file}; if another export left the file, delete it"
                if layers
                else "check whether another export left this file: the index places no key in it",
                group="lacks",
                kind="unlisted",
            )


def _double(ckpt: Checkpoint, index: WeightIndex, stored_keys: KeysByFile) -> Iterator[Finding]:
    """Findings on keys that a further file holds beside the one that the index names.

    Source: transformers 5.23 get_checkpoint_shard_files, vllm 0.11 filter_duplicate_safetensors_files: they open the
    files that the index names, in sorted order, and no other; of two copies of a key the later one is loaded
    """
    named = set(index.places.values())
    copies: dict[tuple[str, str, _Use], list[str]] = defaultdict(list)
    for key, files in _files_by_key(stored_keys).items():
        place = index.places.get(key, "")
        # of torch's own shards each has a part of the key
        if len(files) == 1 or place not in files or ckpt.format == "dcp-safetensors":
            continue
        last = max(file for file in files if file in named)
        for file in files:
            if file != place:
                use = _compared(ckpt, stored_keys[place][key], stored_keys[file][key])
                if use != "equal" and file != last:
                    use = "old" if file in named else "unopened"
                copies[file, place, use].append(key)
    for (file, place, use), keys in copies.items():
        keys.sort()
        size = human_bytes(sum(int(ckpt.records.byte_length[stored_keys[file][key]]) for key in keys))
        message, why, hint = (text.format(index=index.file, place=place, file=file, size=size) for text in _DOUBLE[use])
        rows = stored_keys[place][keys[0]], stored_keys[file][keys[0]]
        sizes = f"{keys[0]} is {' and '.join(f'{d} {list(s)}' for d, s in _described(ckpt, *rows))}"
        yield Finding(
            message.replace("KEYS", _keys_text(keys)),
            at=Location(file=file),
            identity=(file, *keys[:MOST_KEYS]),
            keys=tuple(keys[:MOST_KEYS]),
            severity=Severity.INFO if not hint else None if use == "reshaped" else Severity.WARNING,
            notes=(*_key_note(keys), ("sizes", sizes if use == "reshaped" else "")),
            why=why,
            hint=hint,
            group="double",
            kind="double",
        )


_Use = Literal["old", "unopened", "equal", "reshaped", "changed", "unknown"]
_LATER = (
    "two files hold KEYS: {index} names {place}, but transformers and vLLM load the copies in {file}",
    "they open the files of the index in sorted order, and a later copy replaces an earlier one",
    "delete the copies in {file} if those in {place} are right, or merge again; an index written again changes nothing",
)
_DOUBLE: dict[_Use, tuple[str, str, str]] = {
    "old": (
        "{file} still holds old copies of KEYS that {index} places in {place}: {size} wasted",
        "transformers and vLLM load the last copy in the sorted order of the files, not this one",
        "",
    ),
    "equal": ("{file} holds KEYS with the same bytes as {place}: {size} wasted", "either copy loads the same", ""),
    "unopened": (
        "{file}, which {index} does not name, holds KEYS that it places in another file, {place}",
        "transformers and vLLM do not open it; a loader that takes every file may load these copies",
        "check whether another export left this file; if so, delete it",
    ),
    "reshaped": (_LATER[0].replace("KEYS", "KEYS, with another shape or dtype"), *_LATER[1:]),
    "changed": (_LATER[0].replace("KEYS", "KEYS, with different values"), *_LATER[1:]),
    "unknown": _LATER,
}
"""Message, why and hint; what is harmless has no hint."""


def _compared(ckpt: Checkpoint, row: int, second: int) -> _Use:
    """How two records of a key differ, as far as was read."""
    described = _described(ckpt, row, second)
    if not described:
        return "unknown"
    if described[0] != described[1]:
        return "reshaped"
    payload, both = ckpt.payload, [row, second]
    if not ckpt.records.byte_length[row]:
        return "equal"
    if payload is None or (payload.state[both] != RecordState.RAW).any() or (payload.crc[both] < 0).any():
        return "unknown"
    return "equal" if payload.crc[row] == payload.crc[second] else "changed"


def _described(ckpt: Checkpoint, *rows: int) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each record; [] where no copies are known, but parts of a tensor or states of a parameter."""
    tensor, copies = ckpt.tensors.get(ckpt.records.name(rows[0])), ckpt.records.copies
    if tensor is None or not copies.keys() & {*rows}:
        return []
    return [copies.get(row, (tensor.dtype, tensor.global_shape)) for row in rows]


def _total_size(ckpt: Checkpoint, index: WeightIndex) -> Iterator[Finding]:
    """A finding if `total_size` of the index is not the sum of the tensors' bytes and every file could be read."""
    records = ckpt.records
    owned = np.flatnonzero(records.owned)
    if ckpt.storages is not None:  # tied weights may share one, which is counted once
        owned = owned[
            np.unique(np.stack([records.file[owned], records.byte_offset[owned]]), axis=1, return_index=True)[1]
        ]
    stored = int(records.byte_length[owned].sum())
    is_listed = np.array([key in index.places for key in records.fqns], bool)[records.fqn[owned]]
    if index.total_size == int(records.byte_length[owned][is_listed].sum()):
        return  # what the index does not list, it does not count
    if index.total_size is None or stored in (index.total_size, index.total_size << 20) or index.unread:
        return  # ColossalAI counts in MiB
    # Writers sum the bytes before they drop one of two tied weights, or count headers (less than 1 %): no fault.
    tables = [tensor for tensor in ckpt.tensors.values() if parse(tensor.fqn).function in ("embedding", "output")]
    tied = {nbytes(table.dtype, table.volume) for table in tables}
    difference = index.total_size - stored
    fewer = "fewer" if difference > 0 else "more"
    if explains_bytes(ckpt, index.total_size):
        return
    is_close = abs(difference) <= _SLACK * stored or difference in tied
    counted = "" if is_close else _counted_instead(ckpt, index.total_size)
    yield Finding(
        f"total_size of {index.file}, {index.total_size:,}, is {counted}, not the {stored:,} bytes that are stored"
        if counted
        else f"{index.file} says {index.total_size:,} bytes in total, but {stored:,} are stored",
        at=Location(file=index.file),
        identity=("total_size",),
        kind="counted" if counted else "total",
        severity=Severity.INFO if is_close else Severity.WARNING,
        why="its writer counted something else, which says nothing against the weights"
        if counted
        else "the index was written for files different from these",
        notes=() if counted else (("difference", f"{human_bytes(abs(difference))} {fewer} are stored"),),
        hint=""
        if is_close
        else f"set total_size to {stored:,}"
        if counted
        else "compare the index with that of the export; a change of dtype alone has the same effect",
    )


def _counted_instead(ckpt: Checkpoint, total: int) -> str:
    """What a total counts in place of the stored bytes; "" where nothing that writers confuse explains it."""
    elements = sum(tensor.volume for tensor in ckpt.tensors.values())
    counts = {len(ckpt.tensors): "the number of tensors", elements: "the number of elements"}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        counts.setdefault(size * elements, f"the size of the same elements in {dtype}")
    return counts.get(total, "")


def _without_index(ckpt: Checkpoint, stored_keys: KeysByFile) -> Iterator[Finding]:
    """A finding on keys that two files hold, or on several files without an index."""
    homes = _files_by_key(stored_keys)
    shared = sorted(key for key, files in homes.items() if len(files) > 1)
    uses = {
        _compared(ckpt, stored_keys[homes[key][0]][key], stored_keys[file][key])
        for key in shared
        for file in homes[key][1:]
    }
    if shared and not ckpt.partial_because:
        files = sorted({file for key in shared for file in homes[key]})
        differ = "shape or dtype" if "reshaped" in uses else "values" if "changed" in uses else ""
        is_same = uses == {"equal"}
        yield Finding(
            f"several files hold {_keys_text(shared)}, and no index names the right one"
            + f"; the copies differ in {differ}" * bool(differ),
            at=Location(file=files[0], label=first_names(files, _SHOWN)),
            identity=tuple(shared[:MOST_KEYS]),
            keys=tuple(shared[:MOST_KEYS]),
            kind="double",
            severity=Severity.INFO if is_same else Severity.WARNING,
            notes=_key_note(shared),
            why="all copies have the same bytes, so any of them may be loaded"
            if is_same
            else "the order of the files decides which copy is loaded, with an index too",
            hint=""
            if is_same
            else "check whether an earlier export left files in this folder, and delete those; else merge again",
        )
    if not ckpt.partial_because and uses <= {"equal"}:
        # transformers opens numbered files only by an index. Mistral's `consolidated` files and torch's own writer need
        # none. If a numbered file is missing too, that is the finding.
        is_read_by_index = (
            not ckpt.writer  # torch's own, whose reader takes every file
            and all(_NUMBERS.fullmatch(file) and not file.startswith("consolidated") for file in ckpt.files.names)
            and not _lost_numbers(ckpt)
        )
        is_refused = is_read_by_index and ckpt.config is not None and ckpt.config.file == MODEL_CONFIG
        yield Finding(
            f"the model lies in {len(ckpt.files)} files without an index",
            identity=("index",),
            kind="no index",
            severity=None if is_refused else Severity.WARNING if is_read_by_index else Severity.INFO,
            why="transformers refuses several files without an index; other loaders take every file",
            hint="write the index from the headers of the files, or copy it from where the model was written",
        )


def _lost_numbers(ckpt: Checkpoint) -> list[tuple[int, set[int], set[int]]]:
    """(N, numbers that files have, numbers that no file has) for names `<stem>-<k>-of-<N>` with missing files."""
    by_total: dict[int, set[int]] = defaultdict(set)
    for name in ckpt.files.names:
        if match := _NUMBERS.fullmatch(name):
            by_total[int(match[2])].add(int(match[1]))
    lost = []
    for total, present in by_total.items():
        first = 0 if 0 in present else 1
        if missing := set(range(first, min(first + total, _MOST))) - present:
            lost.append((total, present, missing))
    return lost


def _missing_numbers(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on numbers k of the names `<stem>-<k>-of-<N>` that no file has."""
    is_listed = ckpt.index is not None
    is_judged = not (is_listed and has_known_config(ckpt))  # else CFG001 reports what the lost files held
    for total, present, missing in _lost_numbers(ckpt) if is_judged else ():
        yield Finding(
            f"{numbered('file', missing)} of {total} {verb(len(missing), 'is')} missing",
            at=Location(label=f"{len(present)} of {total} files are there"),
            identity=tuple(f"{number}-of-{total}" for number in sorted(missing)),
            kind="numbers",
            severity=Severity.WARNING if is_listed or ckpt.format == "dcp-safetensors" else None,
            why="the index was made without them, so their tensors are not loaded and no error says so"
            if is_listed
            else "",
            hint="compare with the original model; if it is whole without them, number the files again"
            if is_listed
            else "copy the missing files again from where the model was written",
        )


def _keys_text(keys: list[str]) -> str:
    return f"the key {keys[0]}" if len(keys) == 1 else f"{len(keys):,} keys"


def _key_note(keys: list[str]) -> tuple[Note, ...]:
    return (("keys", first_names(fold_names(keys), _SHOWN)),)
