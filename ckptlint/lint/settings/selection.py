"""Which rules run, and how severe they are: codes, names, prefixes and ALL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptlint.depth import Depth
from ckptlint.errors import ConfigError
from ckptlint.grouping import grouped
from ckptlint.model.text import nearest
from ckptlint.rule import Option, Rule, Severity


def select(
    rules: Sequence[Rule],
    *,
    chosen: Iterable[str] = (),
    extended: Iterable[str] = (),
    ignored: Iterable[str] = (),
    severities: Iterable[tuple[str, str]] = (),
    depth: Depth = Depth.FILES,
    has_reference: bool = False,
    only_raise: bool = False,
) -> tuple[Rule, ...]:
    """The rules to run, with the user's severities; with `only_raise` none below a rule's own.

    Fixed rules always run: a file that could not be read safely must never pass.

    Raises:
        ConfigError: an unknown rule or level, an attempt to switch off or lower a fixed rule, or a rule chosen
            by its own code or name that needs a greater depth or a reference.
    """
    chosen, extended = list(chosen), list(extended)
    codes = {*matching(rules, chosen or ["ALL"]), *matching(rules, extended)}
    for token in ignored:
        codes -= ignorable(rules, token)
    fixed = {rule.code for rule in rules if rule.fixed}
    codes |= fixed
    for token in [*chosen, *extended]:
        for named in [rule for rule in rules if token in (rule.code, rule.name)]:
            if named.live:
                raise ConfigError(f"{named.code} {named.name} judges a running job: call ckptlint.live.check there")
            if not depth.reaches(named.depth):
                raise ConfigError(f"{named.code} {named.name} needs --depth {named.depth}, but the depth is {depth}")
            if named.expects and not has_reference:
                raise ConfigError(f"{named.code} {named.name} needs --expect REF to compare with")
    levels = {}
    for token, level in severities:
        if level.upper() not in Severity.__members__:
            raise ConfigError(f"{level!r} is not a severity: use error, warning or info")
        for code in matching(rules, [token]):
            if code in fixed:
                raise ConfigError(f"the severity of {code} cannot be changed: unsafe input must never pass")
            levels[code] = Severity[level.upper()]
    if only_raise:
        levels = {rule.code: max(levels[rule.code], rule.severity) for rule in rules if rule.code in levels}
    return tuple(replace(rule, severity=levels.get(rule.code, rule.severity)) for rule in rules if rule.code in codes)


def ignorable(rules: Sequence[Rule], token: str) -> set[str]:
    """The codes that an ignore of this code, name or prefix means; raises ConfigError where there is none to ignore."""
    dropped = set(matching(rules, [token]))
    fixed = {rule.code for rule in rules if rule.fixed and rule.code in dropped}
    if fixed == dropped:
        raise ConfigError(f"{', '.join(sorted(fixed))} cannot be ignored: unsafe or unreadable input must never pass")
    return dropped - fixed


def configured(rules: Sequence[Rule], tables: Mapping[str, Mapping[str, object]]) -> tuple[Rule, ...]:
    """The rules with options of their own set: code or name -> option -> value.

    Raises ConfigError for an unknown rule or option, or a value of another type than the option's default.
    """
    values: dict[str, dict[str, Option]] = {}
    for token, table in tables.items():
        rule = find_rule(rules, token)
        options = rule.options
        for option, value in table.items():
            if option not in options:
                near = nearest(option, options)
                more = f", did you mean {near}?" if near else f"; it has {', '.join(options) or 'none'}"
                raise ConfigError(f"{rule.code} {rule.name} has no option {option!r}{more}")
            kind = type(options[option])
            if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
                value = tuple(value)
            if not (type(value) is kind or (kind is float and type(value) is int)):
                wanted = "a list of strings" if kind is tuple else kind.__name__
                raise ConfigError(f"{option} of {rule.code} {rule.name} takes {wanted}, not {value!r}")
            values.setdefault(rule.code, {})[option.replace("-", "_")] = value
    return tuple(replace(rule, values=values[rule.code]) if rule.code in values else rule for rule in rules)


def find_rule(rules: Sequence[Rule], token: str, also: Iterable[str] = ()) -> Rule:
    """The rule of a code or name, in any case; otherwise raises ConfigError, with the nearest name, also of `also`."""
    for rule in rules:
        if token.upper() == rule.code or token.lower() == rule.name:
            return rule
    if family := _families(rules).get(token.upper()):
        raise ConfigError(f"{token} is a family: name one of {', '.join(family)}")
    raise ConfigError(_unknown(rules, token, also))


def _families(rules: Sequence[Rule]) -> dict[str, list[str]]:
    """The letters of codes -> the codes."""
    return grouped((rule.code.rstrip("0123456789"), rule.code) for rule in rules)


def matching(rules: Sequence[Rule], tokens: Iterable[str]) -> list[str]:
    """The codes that these codes, names and prefixes mean; raises ConfigError where one means no rule."""
    codes: list[str] = []
    for token in tokens:
        wanted = token.strip()
        start = "" if wanted.upper() == "ALL" else wanted.upper()
        hits = [rule.code for rule in rules if wanted.lower() == rule.name or rule.code.startswith(start)]
        if not wanted or not hits:
            raise ConfigError(_unknown(rules, wanted))
        codes += hits
    return codes


def _unknown(rules: Sequence[Rule], token: str, also: Iterable[str] = ()) -> str:
    known = [*(rule.code for rule in rules), *(rule.name for rule in rules), *also]
    families = [*_families(rules)]
    is_short = len(token) <= max(map(len, families), default=0)
    tries = [(token.upper(), families if is_short else []), (token.upper(), known), (token.lower(), known)]
    near = next(filter(None, (nearest(word, names) for word, names in tries)), "")
    return f"there is no rule {token!r}" + (f", did you mean {near}?" if near else "; `ckptlint rules` lists them")
