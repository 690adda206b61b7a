"""What a configuration made to harm costs: `python bench/speed/hostile_config.py [--times N]`, a markdown table.

An export of 1,000 tensors is checked in a process of its own, once without a `config.json` and once with each of these
beside it. What counts is the increase: of the processor time that the process and its children took, and of the memory
that the larger one of them held at most. The least of several turns is taken, since other work only adds. Linux alone.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 110,
    "vocab_size": 300,
    "transformers_version": "5.0.0",
}
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 47,
    "num_experts": 137,
    "transformers_version": "5.0.0",
}

CHILD = """
import resource, sys
import ckptlint
report = ckptlint.check(sys.argv[1])
parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
seconds = sum(part.ru_utime + part.ru_stime for part in parts)
reason = report.checkpoints[0].not_applicable.get("CFG001") or [
    item.title for item in report.diagnostics if item.code in ("CFG001", "CFG002", "CFG003", "SAF002", "SAF003")
][:1] or ["silent"]
status = open("/proc/self/status").read()  # its ru_maxrss would count what started it as well
own = int(status.partition("VmHWM:")[2].split()[0])
print(seconds, max(own, parts[1].ru_maxrss), reason if isinstance(reason, str) else reason[0], sep="\\t")
"""


def hostile() -> dict[str, str]:
    """What is wrong -> the text of the configuration."""
    nested = '{"text_config": ' * 1_000 + "1" + "}" * 1_000
    changed = {
        "nothing: the right configuration": {},
        "num_hidden_layers 10^9": {"num_hidden_layers": 10**9},
        "num_hidden_layers 2 * 10^4": {"num_hidden_layers": 20_000},
        "num_hidden_layers of 4,000 digits": {"num_hidden_layers": 10**3_999},
        "hidden_size 10^18": {"hidden_size": 10**18},
        "vocab_size -300": {"vocab_size": -300},
        "num_attention_heads 0": {"num_attention_heads": 0, "head_dim": None},
        "hidden_size a text": {"hidden_size": "64"},
        "hidden_size a list of 10^6": {"hidden_size": [64] * 10**6},
        "model_type a list": {"model_type": ["llama"]},
        "architectures a text of 10 MB": {"architectures": "x" * 10 * MIB},
        "architectures of 10^6 items": {"architectures": ["LlamaForCausalLM"] * 10**6},
        "100,000 fields": {f"field_{i}": i for i in range(100_000)},
    }
    found = {name: json.dumps(LLAMA | values) for name, values in changed.items()}
    found["layers and experts of 19,800 tensors"] = json.dumps(MOE)
    found["a file of 100 MB"] = json.dumps(LLAMA | {"note": "x" * 100 * MIB})
    found["100 MB of nested lists"] = "[" * (100 * MIB)
    found["thousand nested levels"] = json.dumps(LLAMA)[:-1] + f', "text_config": {nested}}}'
    found["no JSON"] = "{" * 1_000
    return found


def export(folder: Path) -> None:
    """An export that fits the right configuration: one safetensors file, its data a hole."""
    from ckptlint.architecture.huggingface import expected_models

    header, end = {}, 0
    for name, tensor in expected_models(LLAMA)[0].tensors.items():
        size = 2
        for extent in tensor.shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def measured(folder: Path, times: int) -> tuple[float, float, str]:
    """Seconds of the processor, MiB, and what the check says."""
    seconds, memory, told = [], [], ""
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=True, timeout=600
        )
        second, peak, told = done.stdout.rstrip("\n").split("\t")
        seconds.append(float(second))
        memory.append(int(peak) / 1024)
    return min(seconds), min(memory), told


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    options.add_argument("--times", type=int, default=5)
    times = options.parse_args().times
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        export(folder)
        alone = measured(folder, times)
        print(f"without a configuration: {alone[0]:.2f} s, {alone[1]:.0f} MiB\n")
        print("| config.json | more seconds | more MiB | what is said |\n|---|--:|--:|---|")
        for name, text in hostile().items():
            (folder / "config.json").write_text(text, encoding="utf-8")
            seconds, memory, told = measured(folder, times)
            print(f"| {name} | {seconds - alone[0]:.2f} | {memory - alone[1]:.0f} | {told[:120]} |", flush=True)


if __name__ == "__main__":
    main()
