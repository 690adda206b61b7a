"""How quantised weights are stored."""

from __future__ import annotations

import re

from ckptlint.analysis.quantised import WIDE
from ckptlint.vocabulary.schemes import schemes


def test_wide_codes_have_wide_parts_right_below_them() -> None:
    """Where no tensor is one of these, `quantisation` reads no scheme."""
    wide = [scheme for scheme in schemes() if not WIDE.isdisjoint(scheme.dtypes)]
    assert wide
    for scheme in wide:
        names = {name: part.common.get(name, part.dtypes) for part in scheme.parts for name in part.names}
        names_of_wide = [name for name, dtypes in names.items() if not dtypes or not WIDE.isdisjoint(dtypes)]
        assert scheme.weight == "{weight}"
        assert names_of_wide
        assert all(re.fullmatch(r"\{weight\}\.[^.]+", name) for name in names_of_wide)
