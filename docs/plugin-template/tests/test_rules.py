"""Every case of every fixture: the findings it expects, and no others."""

from pathlib import Path

import pytest
from acme_ckpt_rules.acm001_wide_float import wide_float

from ckptlint.testing import described, fixture_cases, run_case

RULES = {rule.code: rule for rule in (wide_float,)}
CASES = list(fixture_cases(Path(__file__).parent.parent / "fixtures"))


@pytest.mark.parametrize(("code", "case"), CASES, ids=[f"{code}: {case.name}" for code, case in CASES])
def test_finds_what_the_case_expects(code, case, tmp_path):
    assert described(run_case(RULES[code], case, tmp_path / "case")) == sorted(case.expect)
