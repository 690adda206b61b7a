"""Hold what `ckptlint.planning.megatron` says of a load against what came of it.

python bench/evidence/megatron_compare.py OUT ...  # folders of megatron_loads.py; `saved` names where saves lie
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptlint import load
from ckptlint.planning.megatron import constraints
from ckptlint.planning.outcome import Constraint

AXES = ("tp", "pp", "vpp", "ep", "etp", "dp")


def foretold(folder: Path, job: Mapping[str, Any], version: str) -> list[Constraint]:
    """The constraints of a load by the job of an outcome."""
    to = {axis: job[axis] for axis in AXES if job[axis]}
    give_up = frozenset({"optim"} & {"optim" * bool(job["no_load_optim"] or job["finetune"])})
    give_up |= {"rng"} & {"rng" * bool(job["no_load_rng"] or job["finetune"])}
    major, minor = version.split(".")[:2]
    return constraints(load(str(folder)), to, give_up, (int(major), int(minor)))


def disagreements(row: Mapping[str, Any], said: list[Constraint]) -> list[str]:
    """Where an outcome and the constraints say different things, a sentence each."""
    job = row["loaded"]
    fails = [one for one in said if one.effect == "fails"]
    drops = [one for one in said if one.effect == "drops"]
    if job["fully_parallel_load"]:  # a flag of its own, named in a note
        fails += [one for one in said if "--ckpt-fully-parallel-load" in one.sentence]
    if job["bucket"] != row["saved"]["bucket"]:
        fails += [one for one in said if "--ddp-bucket-size" in one.sentence]
    if job["strictness"] == "raise_all":
        fails += drops
    if row["raised"]:
        return [] if fails else [f"it raises {next(iter(row['raised'].values()))}, and nothing said so"]
    if fails:
        return [f"it loads, and was said to fail: {fails[0].sentence}"]
    found = []
    lost = {key for one in drops for key in one.keys}
    given_up = {key for one in said if "--no-load-" in one.sentence for key in one.keys}
    if row["rng"] != ["as saved"] and not row["saved"]["no_save_rng"] and "rng_state" not in lost | given_up:
        found.append(f"random states are {row['rng']}, and nothing said so")
    if row["rng"] == ["as saved"] and "rng_state" in lost:
        found.append("random states are as saved, and were said to be dropped")
    differences = row["differences"]
    for what in ("not as saved", "not held", "new", "ranks differ"):
        keys = differences.get(what, [])
        gone = [key for key in keys if key.startswith("optimizer.")] if not row["saved"]["no_save_optim"] else []
        if gone and not any("optimizer" in key for key in lost | given_up):
            found.append(f"{keys[0]} is {what}, and nothing said so")
        if model := [key for key in keys if not key.startswith("optimizer.") and key not in lost]:
            found.append(f"{model[0]} is {what}, and nothing said so")
    if "padding not zero" in differences and not any("are not set" in one.sentence for one in said):
        found.append(f"the padding of {differences['padding not zero'][0]} is not zero, and nothing said so")
    if "other shape" in differences and not any("pads the vocabulary" in one.sentence for one in said):
        found.append(f"{differences['other shape'][0]}, and nothing said so")
    return found


def main() -> None:
    """Print a row for every pair, and the number of disagreements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="+")
    count = wrong = 0
    for out in parser.parse_args().out:
        outcomes = json.loads((out / "outcomes.json").read_text())
        saved_by = Path(outcomes.get("saved_by") or out)
        for name, row in outcomes["pairs"].items():
            if row.get("unsaved"):
                print(f"{outcomes['version']}  {name}: NOT SAVED")
                continue
            said = foretold(saved_by / name.replace(" ", "_") / "iter_0000010", row["loaded"], outcomes["version"])
            problems = disagreements(row, said)
            count, wrong = count + 1, wrong + bool(problems)
            came = "raises" if row["raised"] else "loads"
            print(f"{outcomes['version']}  {name}: {came} {'DISAGREES' if problems else ''}")
            for line in problems or [f"{one.effect}: {one.sentence}" for one in said]:
                print(f"    {line}")
    print(f"{count} pairs, {wrong} disagree")


if __name__ == "__main__":
    main()
