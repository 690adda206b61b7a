"""Checksums of whole files, from Megatron-Core, sha256sum, signatures and the metadata of download caches."""

from __future__ import annotations

import json
import re
from binascii import a2b_base64
from collections.abc import Mapping
from pathlib import Path, PurePath

from ckptlint.errors import ConfigError, UnreadableError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.problems import from_error
from ckptlint.model import Checkpoint, Damage, Problem
from ckptlint.model.text import plural, printable
from ckptlint.patterns import lazy_pattern
from ckptlint.payload.archives.members import members_of
from ckptlint.payload.stream import Meter, stream
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.frameworks import family_of

INTEGRITY = "integrity.json"
SIGNATURE = "model.sig"
_BLOB = "the name of its blob"
_DOWNLOADS, _NOTE, _NOTE_LIMIT = ".cache/huggingface/download", ".metadata", 4096
_JSON_LIMIT = 64 * 1024**2
_SHA256 = lazy_pattern(r"[0-9a-f]{64}")
_LISTS = lazy_pattern(r"sha256sums(\.txt)?|checksums\.sha256|.+\.sha256", re.IGNORECASE)
_LIST_LIMIT = 1024**2
_WHY, _HINT = "no file can be compared with it", "copy it again from where it was written"
_NUMBER = lazy_pattern(r"\d+")
_LINES = (
    lazy_pattern(r"(?P<sum>[0-9a-fA-F]{32,128}) [ *](?:\./)?(?P<name>.+)"),
    lazy_pattern(r"SHA256 \((?:\./)?(?P<name>.+)\) = (?P<sum>[0-9a-fA-F]{32,128})"),
)


def expected_sums(file: str) -> dict[str, str]:
    """File -> its checksum as text with the name of the list, as sha256sum writes one.

    Raises ConfigError where it cannot be read, or no line of it is a checksum.
    """
    try:
        listed = _sums_in(Path(file).read_bytes()[:_LIST_LIMIT])
    except OSError as error:
        raise ConfigError(f"{printable(file)}: {error.strerror}") from None
    listed = {name: digest for name, digest in listed.items() if _SHA256.fullmatch(digest)}
    if not listed:
        raise ConfigError(f"{printable(file)} lists no SHA-256: its lines are a digest, two spaces, a name")
    return {name: _recorded(sums, printable(Path(file).name)) for name, sums in listed.items()}


def recorded_sums(
    folder: Folder, ckpt: Checkpoint, expected: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], list[Problem]]:
    """(file -> checksum with its source as text, payload file -> the list of all files that lacks it, problems).

    Those of the user's list, `expected`, take precedence.
    """
    listed, problems = _integrity(folder)
    signed = _signed(folder, problems)
    names = [name for name in folder.files_beside() if _LISTS.fullmatch(name)]
    lists = {name: _list(folder, name, problems) for name in names} | {SIGNATURE: signed or {}}
    # Later sources win. Assumed: the closer a source is to the save, the better. A cache only knows the download, and
    # integrity.json was written by the save itself.
    sums = (
        (_BLOB, _blob_names(folder)),
        (_DOWNLOADS, _downloaded(folder)),
        ("the Hub", folder.sums),
        *((printable(name), _of_payload(folder, ckpt, name, sums, problems)) for name, sums in lists.items()),
        (INTEGRITY, listed or {}),
    )
    sums_by_file = {name: _recorded(recorded, source) for source, by_file in sums for name, recorded in by_file.items()}
    whole = [(name, files) for name, files in ((SIGNATURE, signed), (INTEGRITY, listed)) if files is not None]
    unlisted = {file.name: name for name, files in whole for file in ckpt.files if file.path and file.path not in files}
    return {**sums_by_file, **expected}, unlisted, problems


def _recorded(digest: str, source: str) -> str:
    return f"SHA-256 {digest:64} of {source}"


def not_expected(ckpt: Checkpoint, expected: Mapping[str, str]) -> list[Damage]:
    """Damages for payload files that the user's list does not name."""
    source = next(iter(expected.values()))
    names = [file.path for file in ckpt.files if file.path is not None and file.path not in expected]
    return [Damage(-1, printable(name), "", source, "unlisted") for name in names]


def differs(computed: str, recorded: str) -> bool:
    """Whether a SHA-256 differs from a recorded text (see `recorded_sums`)."""
    return computed != recorded[8:72].strip()


def compare_others(folder: Folder, ckpt: Checkpoint, recorded: Mapping[str, str]) -> tuple[list[Damage], list[str]]:
    """(Damages for files with a checksum that are absent, or differ and are no payload; those that match, printable).

    Raises AccessError where a read is refused.
    """
    payload = {file.path for file in ckpt.files if file.path is not None and file.size is not None}
    damages, matched = [], []
    for name, recorded_sum in recorded.items():
        if name in payload:
            continue
        state, size = folder.stat(name)
        is_there = state in ("ok", "link-outside") and size is not None
        computed = stream(folder, name, members_of([]), {}, size, Meter()).sha256 if is_there else "absent"
        if not is_there or differs(computed, recorded_sum):
            damages.append(Damage(-1, printable(name), "", recorded_sum, computed))
        else:
            matched.append(printable(name))
    return damages, matched


def _integrity(folder: Folder) -> tuple[dict[str, str] | None, list[Problem]]:
    """File -> SHA-256 as Megatron-Core recorded it; None without a record.

    Source: megatron.core.dist_checkpointing (>= 0.18) with verify_integrity: `algorithm`, `files` name -> hex digest
    """
    if not folder.has(INTEGRITY):
        return None, []
    listed, error = read_json(folder, INTEGRITY, _JSON_LIMIT)
    files = listed.get("files")
    if error is None and isinstance(files, dict) and listed.get("algorithm") == "sha256":
        return {name: str(text).lower() for name, text in files.items()}, []
    error = error or UnreadableError("lists no SHA-256 checksums of files")
    return None, [from_error(error, INTEGRITY, hint=_HINT, why=_WHY)]


def _list(folder: Folder, name: str, problems: list[Problem]) -> dict[str, str]:
    """File -> SHA-256 of a list of sha256sum; {} for one that cannot be read."""
    try:
        return _sums_in(folder.read(name, _LIST_LIMIT))
    except UnreadableError as error:
        problems.append(from_error(error, name, hint=_HINT, why=_WHY))
        return {}


def _signed(folder: Folder, problems: list[Problem]) -> dict[str, str] | None:
    """File -> SHA-256 from a model's signature, which nobody verified; None without one, or with other hashes.

    Source: model_signing (1.1) signing: `model.sig` is a bundle of Sigstore whose `dsseEnvelope` has an in-toto
    statement in Base64, and its `predicate.resources` name, algorithm and digest of each file
    """
    if not folder.has(SIGNATURE):
        return None
    bundle, error = read_json(folder, SIGNATURE, _JSON_LIMIT)
    try:
        listed = json.loads(a2b_base64(bundle["dsseEnvelope"]["payload"]))["predicate"]["resources"]
        return {str(entry["name"]): str(entry["digest"]) for entry in listed if entry["algorithm"] == "sha256"} or None
    except (ValueError, TypeError, LookupError, RecursionError):
        error = error or UnreadableError("holds no list of hashes, as model_signing signs one")
        problems.append(from_error(error, SIGNATURE, hint=_HINT, why=_WHY))
        return None


def verifying(folder: Folder) -> str:
    """The command that verifies who signed the checkpoint in a folder; "" without a signature.

    Source: model_signing (1.1) verify: `verificationMaterial` of the bundle holds what its way of signing needs
    """
    material = read_json(folder, SIGNATURE, _JSON_LIMIT)[0].get("verificationMaterial")
    how = {
        "publicKey": "key --public_key KEY.pem",
        "x509CertificateChain": "certificate --certificate_chain CHAIN.pem",
        "certificate": "sigstore --identity WHO --identity_provider URL",
    }
    known = [how[kind] for kind in how if isinstance(material, dict) and kind in material]
    return f"model_signing verify {known[0]} --signature {SIGNATURE}" if known else ""


def _of_payload(
    folder: Folder, ckpt: Checkpoint, name: str, sums: Mapping[str, str], problems: list[Problem]
) -> dict[str, str]:
    """The checksums of present files, and of absent ones whose name differs from payload only in numbers.

    Other absent files are what a download skips (PAY012: "a variant that was not downloaded is not missed"), and texts
    may be edited legally, so neither is compared.
    """
    payload = {file.path: file.size for file in ckpt.files if file.path is not None}
    numbered = {_NUMBER.sub("#", path) for path in payload}
    compared = {
        path: digest
        for path, digest in sums.items()
        if (payload[path] is not None if path in payload else _NUMBER.sub("#", path) in numbered)
        or (path not in payload and folder.has(path) and not _is_text(path))
    }
    if odd := [path for path, digest in compared.items() if not _SHA256.fullmatch(digest)]:
        label, digits = printable(name), len(compared[odd[0]])
        also = f" (and {plural(len(odd) - 1, 'more file')})" if len(odd) > 1 else ""
        sentence = f"{label} has {digits} digits for {printable(odd[0])}{also}, and a SHA-256 has 64: not compared"
        hint = f"take the list again from where the files were written: sha256sum * > {label}"
        problems.append(Problem("unread", label, sentence, why="the list is cut, or of another sum", hint=hint))
    return {path: digest for path, digest in compared.items() if path not in odd}


def _is_text(name: str) -> bool:
    family = family_of(name)
    return family is not None and family.name == "text"


def _downloaded(folder: Folder) -> dict[str, str]:
    """File -> SHA-256 of files downloaded into this folder and unchanged since.

    Source: huggingface_hub (2.4) _local_folder: `.cache/huggingface/download/<file>.metadata` holds commit, etag and
    time, a line each; the etag of a file in LFS is its SHA-256, and a file that is younger by over a second is another
    """
    sums = {}
    notes = folder
    for name in PurePath(_DOWNLOADS).parts:
        if name not in notes.folders():
            return {}
        notes = notes.sub(name)
    for name in notes.files_beside():
        file = name.removesuffix(_NOTE)
        if not name.endswith(_NOTE) or not folder.has(file):
            continue
        try:
            _, etag, written = notes.read(name, _NOTE_LIMIT).decode("ascii").split()
            is_of_it = folder.entries[file].mtime - 1 <= float(written)
        except (UnreadableError, ValueError):
            continue
        if is_of_it and _SHA256.fullmatch(etag):
            sums[file] = etag
    return sums


def _sums_in(text: bytes) -> dict[str, str]:
    """File -> digest, of 64 digits if it is a SHA-256, from the lines of a list.

    Source: GNU coreutils (9) sha256sum: a digest, a space, a space or `*`, a name; with --tag, and of BSD's sha256:
    both with the name of the algorithm before them
    """
    lines = text.decode(errors="replace").splitlines()
    matches = (match for line in lines for pattern in _LINES if (match := pattern.fullmatch(line)))
    return {match["name"]: match["sum"].lower() for match in matches}


def _blob_names(folder: Folder) -> dict[str, str]:
    """File -> SHA-256 of files that are links to a blob with that name.

    Source: huggingface_hub (2.4) file_download: `snapshots/<commit>/<file>` is a link to `blobs/<etag>`, and the etag
    of a file in LFS is its SHA-256; that of others is a Git hash of 40 digits
    """
    targets = {name: PurePath(folder.escapes_to(name)) for name in folder.files_beside()}
    return {
        name: target.name
        for name, target in targets.items()
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) and folder.stat(name)[0] in READABLE
    }
