"""The recipes of `docs/gates.md` and `docs/questions.md`, run.

Stand-ins note what upload, cluster and training would have done. What the pages print is written by `docs/make.py`, and
`test_docs` holds it fresh.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import REAL, REPOSITORY, codes, report_on, sweep_only, swept

from ckptlint.reporters import REPORTERS
from ckptlint.vocabulary.frameworks import WEIGHT_FILES, family_of, may_be_pickle

RECIPES = "\n".join((REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in ("questions.md", "gates.md"))
GOOD, BAD, NOTHING = REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole", REPOSITORY / "docs"

NOTES = '#!/bin/sh\necho "$(basename "$0") $*" >> "$NOTES"\n'
LINT = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m ckptlint "$@"\n'
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
WAITS = '#!/bin/sh\nuntil grep -q GEO004 "$AWAITED"; do command -p sleep 0.2; done\n'
VENV = '#!/bin/sh\nmkdir -p "$3/bin" && cp "$(command -v hf)" "$3/bin/pip" && cp "$(command -v ckptlint)" "$3/bin/"\n'


def blocks(heading: str, language: str) -> list[str]:
    """The code blocks of a section."""
    section = re.split(r"^## ", RECIPES.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., tuple[int, list[str], str]]:
    """Runs a script; returns its exit code, what the stand-ins noted, and all that was printed."""
    stand_ins = {"hf": NOTES, "aws": NOTES, "sbatch": NOTES, "python": NOTES, "srun": SRUN, "ckptlint": LINT}
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (stand_ins | {"python3": VENV}).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def script(text: str, **variables: str | Path) -> tuple[int, list[str], str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPTLINT_")}
        noted = tmp_path / "noted"
        noted.write_text("")
        environment = kept | {
            "PATH": f"{folder}:{kept['PATH']}",
            "NOTES": str(noted),
            **{name: str(value) for name, value in variables.items()},
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text], cwd=tmp_path, env=environment,
            capture_output=True, encoding="utf-8", timeout=600, check=False,
        )  # fmt: skip
        return done.returncode, noted.read_text().splitlines(), done.stdout + done.stderr

    return script


Shell = Callable[..., tuple[int, list[str], str]]


def test_every_shell_block_is_run_here() -> None:
    known = ["Before an upload", "Does my export fit its config?", "Slurm", "Resume from the newest good step"]
    known += ["Beside a running job", "Findings as data"]
    assert RECIPES.count("```sh\n") == sum(len(blocks(heading, "sh")) for heading in known) == 13


def test_every_command_prints_what_it_prints_now() -> None:
    made = re.findall(
        r"(?:^<!-- run\n.*?-->\n```console\n|^```console\n\$ ckptlint [^\n]*fixtures/)", RECIPES, re.M | re.S
    )
    assert RECIPES.count("```console\n") == len(made), "docs/make.py does not know how to run this block"
    assert "command not found" not in RECIPES and "Traceback" not in RECIPES


def test_each_story_has_a_page() -> None:
    table = RECIPES.split("| you want to know | go to |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 9
    assert all(re.search(r"\]\([^)]+\) \|$|\]\([^)]+\), ", row) for row in table)


def test_the_step_before_the_jump_of_the_loss_has_a_hole_in_a_moment() -> None:
    printed, shown = blocks("The loss jumped after a resume", "console")
    assert "error[GEO004]" in printed and "exp_avg" in printed
    assert "3 chunks" in shown and "........" in shown


def test_a_framework_with_live_mode_saves_the_good_state_and_refuses_the_other() -> None:
    (printed,) = blocks("Live mode in a training framework", "console")
    assert "step-2" in printed and "error[LIV205]" in printed and "bias" in printed
    assert "step-1" not in printed.partition("step-2")[2]


@pytest.mark.parametrize("number", [0, *swept(1)])
def test_an_upload_happens_for_a_healthy_checkpoint_alone(shell: Shell, number: int) -> None:
    recipe = blocks("Before an upload", "sh")[number]
    code, noted, _ = shell(recipe, CKPT=GOOD)
    assert code == 0
    assert noted == [f"aws s3 cp --recursive {GOOD} s3://bucket/fsdp2_4r", f"hf upload org/model {GOOD}"][number:][:1]
    assert shell(recipe, CKPT=BAD)[:2] == (1, [])
    assert shell(recipe, CKPT=NOTHING)[:2] == (3, [])


def test_an_export_that_does_not_fit_its_config_is_not_uploaded(shell: Shell) -> None:
    (recipe,) = blocks("Does my export fit its config?", "sh")
    fits, lost = REAL / "exports" / "ok_llama", REAL / "exports" / "R01_shards_lost"
    assert shell(recipe, EXPORT=fits)[:2] == (0, [f"hf upload org/model {fits}"])
    assert shell(recipe, EXPORT=lost)[:2] == (1, [])


def run_folder(tmp_path: Path, *steps: Path) -> Path:
    """A run folder of these steps."""
    for number, step in enumerate(steps, 1):
        shutil.copytree(step, tmp_path / "run" / f"step-{number}")
    return tmp_path / "run"


@sweep_only
def test_a_slurm_job_ends_in_the_verdict_of_its_newest_step(shell: Shell, tmp_path: Path) -> None:
    recipe, submit = blocks("Slurm", "sh")
    run = run_folder(tmp_path, BAD, GOOD)
    code, noted, _ = shell(recipe, RUN_DIR=run, SLURM_JOB_ID="7")
    assert (code, noted) == (0, ["python train.py"])
    assert (tmp_path / "ckptlint-7.json").is_file()
    shutil.copytree(BAD, run / "step-3")
    assert shell(recipe, RUN_DIR=run, SLURM_JOB_ID="7")[0] == 1
    assert shell(submit, SLURM_JOB_ID="7")[1] == ["sbatch --dependency=afterok:7 resume.sh"]


RESUME = "Resume from the newest good step"


@pytest.mark.parametrize("number", [0, *swept(1)])
def test_a_job_resumes_from_the_newest_good_step_or_not_at_all(shell: Shell, tmp_path: Path, number: int) -> None:
    recipe = blocks(RESUME, "sh")[number]
    run = run_folder(tmp_path, GOOD, BAD)
    code, noted, _ = shell(recipe, RUN_DIR=run)
    started = [f"python train.py --resume {run}/step-1", f"sbatch --export=ALL,STEP={run}/step-1 resume.sh"]
    assert (code, noted) == (0, [started[number]])
    shutil.rmtree(run / "step-1")
    assert shell(recipe, RUN_DIR=run)[:2] == (1, [])
    assert shell(recipe, RUN_DIR=NOTHING)[:2] == (3, [])


@sweep_only
def test_an_init_container_leaves_the_step_to_resume_from(shell: Shell, tmp_path: Path) -> None:
    spec = yaml.safe_load(blocks(RESUME, "yaml")[0])
    volumes = {volume["name"] for volume in spec["volumes"]}
    boxes = [*spec["initContainers"], *spec["containers"]]
    assert all(mount["name"] in volumes for box in boxes for mount in box["volumeMounts"])
    run, resume = run_folder(tmp_path, GOOD, BAD), tmp_path / "resume"
    resume.mkdir()
    find, train = (
        " ".join(shlex.quote(word.replace("/ckpt", str(run)).replace("/resume/", f"{resume}/")) for word in words)
        for words in (box["command"] for box in boxes)
    )
    code, noted, _ = shell(f"{find}\n{train}")
    assert (code, noted) == (0, [f"python train.py --resume {run}/step-1"])
    shutil.rmtree(run / "step-1")
    assert shell(find)[0] == 1


@pytest.mark.parametrize(
    ("steps", "code", "noted"),
    [((GOOD, BAD), 0, ["python train.py --resume RUN/step-1"]), *swept(((), 0, ["python train.py"]), ((BAD,), 1, []))],
)
def test_an_sbatch_script_starts_and_resumes(
    shell: Shell, tmp_path: Path, steps: tuple[Path, ...], code: int, noted: list[str]
) -> None:
    script = blocks(RESUME, "sh")[2]
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    (tmp_path / "run").mkdir()
    for number, step in enumerate(steps, 1):
        shutil.copytree(step, tmp_path / "run" / f"step-{number}")
    done = shell(script, RUN_DIR=tmp_path / "run")
    assert done[:2] == (code, [line.replace("RUN", str(tmp_path / "run")) for line in noted])


def test_an_alarm_leads_to_the_step_to_resume_from() -> None:
    (page,) = blocks(RESUME, "console")
    alarm, answer, table = page.removeprefix("$ ").split("\n$ ")
    assert "error[COM001]" in alarm
    assert answer.rstrip().endswith("\nrun/step-1700")
    assert [line.split()[0] for line in table.splitlines()[2:]] == [f"step-{n}" for n in (2000, 1900, 1800, 1700, 1600)]


@sweep_only
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_jq_reads_the_json_report(shell: Shell) -> None:
    findings, verdict, counts = blocks("Findings as data", "sh")
    code, _, printed = shell(findings, CKPT=BAD)
    assert code == 1
    assert [line.split("\t")[0] for line in printed.splitlines()] == ["GEO004", "GEO004"]
    assert all(line.endswith("feed_forward.w1.weight") for line in printed.splitlines())
    summary = json.loads(shell(verdict, CKPT=BAD)[2])
    assert (summary["verdict"], summary["error"]) == ("fail", 1)
    assert json.loads(shell(verdict, CKPT=GOOD)[2])["verdict"] == "pass"
    assert "GEO004 2" in shell(counts, CKPT=BAD)[2].splitlines()


def test_known_findings_are_ignored_or_baselined_and_new_ones_fail() -> None:
    ignored, baselined = blocks("Findings that are known", "console")
    first, second = ignored.removeprefix("$ ").split("\n$ ")
    assert "warning[PAY006]" in first and "[PAY006]" not in second and "ignored" in second
    old, known, new = baselined.removeprefix("$ ").split("\n$ ")
    assert "warning[PAY006]" in old and "[PAY006]" not in known and "baseline" in known
    assert "GEO004" in new and "__9_0.distcp" not in new


def test_a_watch_beside_a_job(shell: Shell, tmp_path: Path) -> None:
    once, beside = blocks("Beside a running job", "sh")
    run = run_folder(tmp_path, GOOD, BAD)
    code, _, _ = shell(once, RUN_DIR=run)
    assert code == 1
    (alarm,) = (tmp_path / "alarms.txt").read_text().splitlines()
    assert alarm.startswith(f"step {run}/step-2 gave 1, see ")
    # more than two intervals are enough once the watch has begun; how long that takes, this machine decides
    interval, pause = re.findall(r"--interval (\d+)|^sleep (\d+)", beside, re.MULTILINE)
    assert int(pause[1]) > 2 * int(interval[0])
    (tmp_path / "bin" / "sleep").write_text(WAITS)
    (tmp_path / "bin" / "sleep").chmod(0o755)
    code, noted, _ = shell(f"exec > {tmp_path}/printed 2>&1\n{beside}", RUN_DIR=run, AWAITED=tmp_path / "printed")
    printed = (tmp_path / "printed").read_text()
    assert (code, noted) == (0, ["python train.py"])
    assert "GEO004" in printed and "Traceback" not in printed


# ---------------------------------------------------------------- YAML


def test_the_gitlab_job_gates_and_keeps_its_report(shell: Shell, tmp_path: Path) -> None:
    (text,) = blocks("GitLab", "yaml")
    job = yaml.safe_load(text)["ckptlint"]
    install, lint = job["script"]
    assert install == "pip install https://github.com/OWNER/ckptlint/archive/COMMIT.zip"
    assert shell(lint, CKPT=GOOD)[0] == 0
    assert shell(lint, CKPT=BAD)[0] == 1
    kept = [*job["artifacts"]["paths"], *job["artifacts"]["reports"].values()]
    assert len(kept) == 3 and all((tmp_path / path).is_file() for path in kept)


@pytest.mark.parametrize("format_", ["full", *swept("github")])
def test_the_github_action_gates(shell: Shell, tmp_path: Path, format_: str) -> None:
    action = yaml.safe_load((REPOSITORY / "action.yml").read_text(encoding="utf-8"))
    (use,) = yaml.safe_load(blocks("GitHub Actions", "yaml")[0])["jobs"]["checkpoint"]["steps"]
    assert set(use["with"]) <= set(action["inputs"])
    assert {name for name, value in action["inputs"].items() if value.get("required")} <= set(use["with"])
    assert action["runs"]["using"] == "composite"
    (step,) = action["runs"]["steps"]
    assert "${{" not in step["run"], "text pasted into a script would be run"
    named = {name: re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value) for name, value in step["env"].items()}
    assert {match[1] for match in named.values() if match} == set(action["inputs"])
    summary = tmp_path / "summary.md"
    defaults = {name: str(value.get("default", "")) for name, value in action["inputs"].items()}
    variables = {name: defaults[match[1]] for name, match in named.items() if match} | {
        "FORMAT": format_,
        "SUMMARY": str("markdown" in REPORTERS).lower(),
        "SOURCE": str(REPOSITORY),
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    code, noted, printed = shell(step["run"], **variables | {"CKPT": GOOD})
    assert code == 0, printed
    assert noted == [f"pip install --quiet {REPOSITORY}"]
    code, _, printed = shell(step["run"], **variables | {"CKPT": BAD})
    assert code == 1 and "GEO004" in printed
    assert summary.is_file() == ("markdown" in REPORTERS)
    hostile = variables | {"CKPT": f"{GOOD}; touch hacked", "OPTIONS": "--strict $(touch hacked)"}
    assert shell(step["run"], **hostile)[0] == 3
    assert not (tmp_path / "hacked").exists()


def test_sarif_is_uploaded_when_the_gate_fails_too(shell: Shell, tmp_path: Path) -> None:
    job = yaml.safe_load(blocks("GitHub Actions", "yaml")[1])["jobs"]["checkpoint"]
    gate, upload = job["steps"]
    assert (upload["if"], job["permissions"]) == ("always()", {"security-events": "write"})
    assert set(gate["env"]) == {"CKPT"}
    assert shell(gate["run"], CKPT=BAD)[0] == 1
    document = json.loads((tmp_path / upload["with"]["sarif_file"]).read_text(encoding="utf-8"))
    assert document["version"] == "2.1.0"
    assert "GEO004" in {item["ruleId"] for item in document["runs"][0]["results"]}


def test_the_pre_commit_hook_knows_every_file_of_weights() -> None:
    """Of the real checkpoints, by their names; no pickle of another ending, and nothing that other programs have."""
    names = {path.name for path in REAL.rglob("*") if path.is_file()}
    families = {name: family_of(name) for name in names if not re.fullmatch(WEIGHT_FILES, name)}
    left_out = {
        name for name, known in families.items() if may_be_pickle(name) or (known and known.content == "pickle")
    }
    assert {Path(name).suffix for name in left_out} == {".pkl", ".joblib"}


def test_a_file_of_a_step_stands_for_the_step(tmp_path: Path) -> None:
    step = shutil.copytree(REAL / "exports/ok_llama_sharded", tmp_path / "checkpoint-10")
    shutil.copy(REAL / "rank_files/accelerated/optimizer.bin", step / "optimizer.bin")
    for name in ("config.json", "model.safetensors.index.json", "optimizer.bin"):
        (part,) = report_on(step / name).checkpoints
        assert part.checkpoint.path == str(step) and part.checkpoint.tensors
    (step / "model-00003-of-00007.safetensors").unlink()
    assert "PAY014" in codes(report_on(step / "config.json"))


def test_a_file_that_is_no_checkpoint_is_refused_in_one_sentence(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 16)
    (tmp_path / "config.json").write_text("{}")
    for name in ("train.bin", "config.json"):
        code, _, printed = shell(f"ckptlint check {name} --format concise")
        assert code == 1 and f"{name} is not a checkpoint that ckptlint checks" in printed
        assert printed.count("\n") == 1


def test_the_pre_commit_hook_checks_the_folder_of_a_changed_file(shell: Shell, tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (repo,) = yaml.safe_load(blocks("pre-commit", "yaml")[0])["repos"]
    (use,) = repo["hooks"]
    assert use["id"] == hook["id"]
    changed = [".metadata", "a/step/.metadata", "a/__0.metadata", "m/model.safetensors.index.json", "a/__3_0.distcp"]
    changed += ["model.safetensors", "m/model-00001-of-00002.safetensors", "iter_0000010/common.pt"]
    assert all(re.search(hook["files"], name) for name in changed)
    changed += [
        "m/model.pt",
        "model.pth",
        "pytorch_model-00001-of-00002.bin",
        "last.ckpt",
        "m/pytorch_model.bin.index.json",
    ]
    changed += [
        "adapter_model.safetensors",
        "a/adapter_model.bin",
        "consolidated.00.pth",
        "mp_rank_00/model_optim_rng.pt",
        "x.pt",
        "step/optimizer.pt",
        "rng_state.pth",
        "training_args.bin",
        "optimizer.bin",
        "a/adapter_config.json",
    ]
    assert all(re.search(hook["files"], name) for name in changed)
    assert hook["files"] == f"(^|/)({WEIGHT_FILES})$"
    others = ["a/.metadata.tmp", "a/x.metadata", "README.md", "metadata.json", "notes.distcp.txt", "a.pt.md"]
    others += [
        "train.bin",
        "config.json",
        "tsconfig.json",
        "package.json",
        "model.safetensors.incomplete",
        "m/tokenizer.json",
    ]
    assert not any(re.search(hook["files"], name) for name in others)

    def commit(*files: Path) -> tuple[int, str]:
        names = " ".join(shlex.quote(str(file)) for file in files)
        code, _, printed = shell(f"{hook['entry']} {shlex.join(use.get('args', []))} {names}")
        return code, printed

    assert commit(GOOD / ".metadata")[0] == 0
    assert commit(GOOD / ".metadata", BAD / ".metadata")[0] == 1
    # all files of one checkpoint are one check; a payload file that was cut beside an unchanged .metadata is found
    copied = shutil.copytree(GOOD, tmp_path / "step")
    names = sorted(path for path in copied.iterdir() if re.search(hook["files"], path.name))
    assert len(names) > 2
    code, printed = commit(*names)
    assert code == 0 and printed.count("tensors") == 1
    payload = next(path for path in names if path.suffix == ".distcp")
    payload.write_bytes(payload.read_bytes()[:-100])
    code, printed = commit(payload)
    assert code == 1 and "PAY004" in printed


def test_a_bucket_is_gated_with_the_options_of_a_volume() -> None:
    volume, bucket = (yaml.safe_load(text) for text in blocks("Kubernetes", "yaml"))
    (gate,) = bucket["initContainers"]
    (other,) = volume["spec"]["template"]["spec"]["initContainers"]
    assert [word for word in gate["args"] if word != "s3://bucket/run"] == [w for w in other["args"] if w != "/ckpt"]
    assert "volumeMounts" not in gate
    lines = (REPOSITORY / "Containerfile").read_text(encoding="utf-8")
    assert "ARG EXTRA=\n" in lines and "--build-arg EXTRA='[remote]'" in RECIPES
    assert lines.rpartition("ENTRYPOINT ")[2].strip() == '["ckptlint"]'
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", lines, re.MULTILINE)).split()
    assert copied and all((REPOSITORY / name).exists() for name in copied)


def test_the_kubernetes_job_ends_on_a_verdict_and_retries_without_one(shell: Shell) -> None:
    job = yaml.safe_load(blocks("Kubernetes", "yaml")[0])
    spec = job["spec"]["template"]["spec"]
    (gate,) = spec["initContainers"]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == gate["name"]
    assert spec["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert gate["volumeMounts"][0]["readOnly"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert all(mount["name"] in volumes for box in [gate, *spec["containers"]] for mount in box["volumeMounts"])

    def exit_code(path: Path) -> int:
        return shell("ckptlint " + shlex.join(str(path) if word == "/ckpt" else word for word in gate["args"]))[0]

    assert exit_code(GOOD) == 0
    assert exit_code(BAD) in rule["onExitCodes"]["values"]
    assert exit_code(NOTHING) in rule["onExitCodes"]["values"]
    assert 4 not in rule["onExitCodes"]["values"]


# ---------------------------------------------------------------- the image


@sweep_only
def test_the_containerfile_installs_from_what_it_copies(tmp_path: Path) -> None:
    try:
        assert int(version("setuptools").partition(".")[0]) >= 77 and version("pip")
    except (PackageNotFoundError, AssertionError):
        pytest.skip("needs pip and setuptools 77 in this environment: the test builds without a network")
    lines = (REPOSITORY / "Containerfile").read_text(encoding="utf-8").splitlines()
    source = tmp_path / "src"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "real")
    for line in lines:
        if line.startswith("COPY ") and not line.startswith("COPY --from"):
            *names, target = line.split()[1:]
            for name in names:
                path = REPOSITORY / name
                if path.is_dir():
                    shutil.copytree(path, source / target, ignore=ignore)
                else:
                    shutil.copy(path, source)
    (install,) = (line.removeprefix("RUN pip ") for line in lines if line.startswith("RUN "))
    command = shlex.split(install.replace("/install", str(tmp_path / "install")).replace("$EXTRA", ""))
    done: Any = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--no-deps", "--no-build-isolation", "--ignore-installed", "--quiet"],
        cwd=source,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "install").rglob("bin/ckptlint")
    site = next((tmp_path / "install").rglob("ckptlint/commands/main.py")).parent.parent
    done = subprocess.run(
        [sys.executable, script, "explain", "GEO004"],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0 and "Bad: " in done.stdout, done.stderr
