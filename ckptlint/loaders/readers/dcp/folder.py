"""A folder of torch.distributed.checkpoint or Megatron-Core becomes a checkpoint, with the version that wrote it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickles.columns import WORTHWHILE
from ckptlint.formats.pickles.rows import Buffer
from ckptlint.formats.pickles.safe_pickle import SIZE_LIMIT, Node, Opaque, Unpickled, read_metadata
from ckptlint.loaders.problems import from_error, from_refusals, of_format
from ckptlint.loaders.readers.common_state import (
    COMMON_ENTRY,
    OWN_ENTRIES,
    StoragePlace,
    read_claims,
    read_common,
    read_configs,
    read_objects,
    unlike_records,
)
from ckptlint.loaders.readers.dcp.megatron import (
    CONFIG_FILE,
    describing_objects,
    dialect,
    missing_marks,
    read_config,
    split_objects,
)
from ckptlint.loaders.readers.dcp.metadata import Description, attributes_of, describe
from ckptlint.loaders.readers.dcp.payload_files import file_table, hollow_files, payload_files
from ckptlint.loaders.readers.dcp.rank_metadata import leftover_files, lost_ranks, rank_files, unsafe_leftovers
from ckptlint.loaders.readers.dcp.save_plans import read_plans
from ckptlint.model import Checkpoint, Declared, Problem
from ckptlint.storage.folder import Folder
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.frameworks import counts_moments, is_counter
from ckptlint.vocabulary.mesh import read_topology
from ckptlint.vocabulary.metadata_files import METADATA, WRITTEN_LAST, ranks_in

_MOMENTS = 1_024  # parameters of an optimizer whose steps are read
_RENAMED = "the writer renames a finished file into place, so an interrupted copy or a full disk truncated it"
_OTHER_CONTENT = "torch reads a pickle there, so another program wrote this file or a copy replaced it"
_BYTECHECKPOINT = "bytecheckpoint."


def read_dcp(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The checkpoint that `.metadata` describes, or the metadata of all ranks; depth `files` looks at the sizes of
    files.

    Raises AccessError where a read is refused.
    """
    is_whole = METADATA in folder.entries
    problems: list[Problem] = []
    names = [METADATA] if is_whole else [*rank_files(folder)]
    unpickled = [(name, _read_metadata(folder, name, problems)) for name in names]
    roots = [made.root for _, made in unpickled if made is not None and made.root is not None]
    label = METADATA if is_whole else f"{names[0]} .. {names[-1]}"
    if roots and isinstance(roots[0], Opaque) and roots[0].module.startswith(_BYTECHECKPOINT):
        problems.append(of_format(METADATA, "ByteCheckpoint"))
        return Checkpoint(folder.display, "unsupported", problems=problems, readable=False)
    described: Description | None = None
    if roots:
        try:
            described = describe(roots, label)
        except UnreadableError as error:
            if not problems:  # a refused root was reported already
                problems.append(from_error(error, label, blocks=True))
    if described is None:
        problems = [replace(problem, blocks=True) for problem in problems]
        return Checkpoint(
            folder.display, "dcp", problems=problems, readable=False, metadata_file=label, files=file_table(folder)
        )
    return _assemble(folder, is_whole, described, roots[0], label, problems, look_at_files)


def _assemble(
    folder: Folder,
    is_whole: bool,
    described: Description,
    root: Node,
    label: str,
    problems: list[Problem],
    look_at_files: bool,
) -> Checkpoint:
    """The checkpoint of a decoded `.metadata`: records and their files, plans, common state, claims, topology."""
    objects, byte_objects = split_objects(described.byte_records)
    config, config_problem = read_config(folder)
    format_ = dialect(described, root.name, config, folder, objects)
    keys = described.byte_records.keys()
    if config_problem and (format_ == "torch_dist" or config_problem.kind != "limit"):
        problems.append(config_problem)  # of a save that was cut it may be the only mark of Megatron-Core
    problems += described.problems
    problems += missing_marks(format_, config, folder, keys)
    partial = ""
    if not is_whole:
        format_ = "dcp-per-rank"
        partial, lost = lost_ranks(folder)
        problems += lost
    else:
        problems += unsafe_leftovers(folder)
    problems += leftover_files(folder)
    common, common_problems = read_common(folder, _locations(described, {COMMON_ENTRY, *OWN_ENTRIES}))
    values, object_problems = read_objects(folder, _locations(described, describing_objects(objects)))
    problems += common_problems + object_problems
    # over a network no record is fetched at the depths that do not ask for it
    others = [item.fqn for item in byte_objects]
    counters = {fqn for fqn in (*others, *described.tensors) if is_counter(fqn)} if folder.is_near else set()
    moments = {*islice(filter(counts_moments, described.tensors), _MOMENTS)} if folder.is_near else set()
    claims, claim_problems = read_claims(folder, _locations(described, counters, of_tensors=True))
    made, moment_problems = read_claims(folder, unlike_records(folder, _locations(described, moments, of_tensors=True)))
    claims += tuple(sorted(made, key=lambda claim: claim.step)[-1:])  # frozen ones lag
    claim_problems += moment_problems
    problems += claim_problems
    plans = read_plans(described.extras.get("all_local_plans"))
    files, locates = payload_files(folder, described, look_at_files)
    problems += hollow_files(folder, files) if look_at_files else []
    unchecked = int(files.are("unchecked").sum()) if look_at_files else 0
    sizes = f"the server does not give the size of {unchecked} of {len(files)} payload files" if unchecked else ""
    declared, model_config, config_problems = read_configs(folder, common)
    if isinstance(backend := config.get("sharded_backend"), str):
        declared["sharded_backend"] = Declared(backend, CONFIG_FILE)
    problems += config_problems
    ranks = {*ranks_in(described.paths)}
    return Checkpoint(
        path=folder.display,
        format=format_,
        writer=_writer(described, root, format_),
        tensors=described.tensors,
        objects=objects,
        byte_objects=byte_objects,
        records=described.records,
        files=files,
        save_plans=plans,
        common=common,
        declared=declared,
        config=model_config,
        object_values=values,
        claims=claims,
        topology=read_topology(declared, objects, plans, ranks),
        problems=problems,
        partial_because=partial,
        locates_bytes=locates,
        metadata_file=label,
        not_looked_at=tuple(sentence for sentence in (folder.not_looked_at, sizes) if sentence),
    )


def _read_metadata(folder: Folder, name: str, problems: list[Problem]) -> Unpickled | None:
    """The unpickled `.metadata`; None, and a problem, where it cannot be read or belongs to another format."""
    try:
        unpickled = read_metadata(_content(folder, name))
    except UnreadableError as error:
        why = _RENAMED if error.position else _OTHER_CONTENT if folder.size(name) else WRITTEN_LAST
        problems.append(from_error(error, name, why="" if isinstance(error, LimitError) else why))
        return None
    if isinstance(unpickled.root, Opaque) and unpickled.root.module.startswith(_BYTECHECKPOINT):
        refused_here = tuple(refused for refused in unpickled.refused if not refused.target.startswith(_BYTECHECKPOINT))
        problems += from_refusals(unpickled._replace(refused=refused_here), name)
        return unpickled
    problems += from_refusals(unpickled, name)
    if not unpickled.refused:
        try:
            attributes_of(unpickled.root, "Metadata")
        except UnreadableError as error:
            problems.append(from_error(error, name, why="torch writes a Metadata object there"))
    return unpickled


def _content(folder: Folder, name: str) -> bytes | Buffer:
    """A metadata file; a large one as a buffer, since a copy of it may be hundreds of megabytes."""
    if (size := folder.size_within(name, SIZE_LIMIT)) < WORTHWHILE:
        return folder.read(name, SIZE_LIMIT)
    buffer = Buffer(folder.blocks(name), size + 1)
    return buffer if buffer.end <= size else folder.read(name, SIZE_LIMIT)  # it was written anew meanwhile


def _locations(described: Description, wanted: set[str], of_tensors: bool = False) -> dict[str, StoragePlace]:
    """Where the records of these entries lie; of tensors, where asked for, those that are one chunk."""
    table = described.records
    rows = {fqn: described.byte_records[fqn] for fqn in sorted(wanted & described.byte_records.keys())}
    names = sorted(wanted) if of_tensors else ()
    tensors = [tensor for fqn in names if (tensor := described.tensors.get(fqn)) is not None]
    rows |= {tensor.fqn: int(tensor.chunks.record[0]) for tensor in tensors if len(tensor.chunks) == 1}
    return {
        fqn: (described.paths[int(table.file[row])], int(table.byte_offset[row]), int(table.byte_length[row]))
        for fqn, row in rows.items()
        if row >= 0 and is_safe(described.paths[int(table.file[row])])
    }


def _writer(described: Description, root: Any, format_: str) -> str:
    """The oldest writer that leaves what was found; a lower bound, since later versions may write the same.

    Source: formats by version: torch 1.13 - 2.15, megatron-core 0.6 - 0.20
    """
    extras = described.extras
    if format_ == "torch_dist":
        if COMMON_ENTRY in described.byte_records:
            return "core >= 0.19"
        if "mcore_data" in extras:
            return "core 0.11-0.16" if "all_local_plans" in extras else "core 0.8-0.10"
        return "core >= 0.16" if "all_local_plans" in extras else "core"
    if described.version is not None:
        return "torch >= 2.9"
    if described.storage_meta is None:
        return "torch < 2.4"
    has_modules = isinstance(described.storage_meta, Node) and "modules" in (described.storage_meta or [{}])[0]
    return "torch >= 2.7" if has_modules else "torch >= 2.4"
