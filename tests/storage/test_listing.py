"""A listing in columns says what a listing of objects would say."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptlint.model.text import printable
from ckptlint.storage.listing import FolderEntry, Listing, is_plain
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.litter import is_system_file

NAMES = st.one_of(
    st.from_regex(r"__[0-9]{1,3}_[01]\.distcp", fullmatch=True),
    st.text(st.sampled_from("aAß_.0\x1b/\\:~\ud800"), min_size=1, max_size=4).map(lambda name: f"{name}.distcp"),
    st.sampled_from([".metadata", "A_0.distcp", "a_0.distcp", "x" * 200 + ".distcp", "._a.distcp", "folder"]),
)
ENTRIES = st.builds(
    FolderEntry,
    st.integers(0, 2**40),
    st.booleans(),
    st.floats(0, 2**31),
    st.booleans(),
    st.sampled_from(["", "a pipe"]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, ENTRIES), st.lists(NAMES), st.sets(NAMES))
def test_it_is_a_mapping_in_order_of_name(entries: dict[str, FolderEntry], asked: list[str], hidden: set[str]) -> None:
    listing = Listing.of(entries.items())
    assert listing.strange == {name: entry.what for name, entry in entries.items() if entry.what}
    entries = {name: entry for name, entry in entries.items() if not entry.what}
    assert list(listing.items()) == sorted(entries.items()) and len(listing) == len(entries)
    assert [listing.get(name) for name in asked] == [entries.get(name) for name in asked]
    names = listing.payload_names()
    assert [names[at] if at >= 0 else None for at in listing.positions(asked)] == [
        name if name in names else None for name in asked
    ]
    assert dict(listing.without(hidden)) == {name: entry for name, entry in entries.items() if name not in hidden}
    for name in asked:
        alike = sorted(other for other in entries if other.casefold() == name.casefold())
        assert listing.of_other_case(name) == (alike[0] if alike else None)


@given(NAMES)
def test_a_plain_name_is_safe_printable_and_no_litter(name: str) -> None:
    if is_plain(name):
        assert is_safe(name) and printable(name) == name and not is_system_file(name)


def test_a_name_that_a_column_would_cut_is_not_found() -> None:
    listing = Listing.of([("a.distcp", FolderEntry(1, False))])
    assert listing.positions(["a.distcp\0", "a.distcp", ""]).tolist() == [-1, 0, -1]


@pytest.mark.parametrize("count", [100_000])
def test_a_payload_file_takes_few_bytes(count: int) -> None:
    tracemalloc.start()
    listing = Listing.of((f"__{number}_0.distcp", FolderEntry(number, False)) for number in range(count))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(listing) == count and held < 50 * count and peak < 50 * count + 2**24
