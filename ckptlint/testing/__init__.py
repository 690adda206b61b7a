"""Checkpoints from small tables: the cases of `fixtures/*.toml`, written out as true DCP folders and read back.

For authors of rules and plug-ins: `read_cases` reads a fixture, `run_case` judges one case with one rule. torch is not
needed: the metadata is pickled with classes that only carry torch's names.
"""

from ckptlint.testing.cases import (
    Case,
    checkpoint_of_ranks,
    described,
    fixture_cases,
    load_folder,
    open_case,
    read_cases,
    run_case,
)
from ckptlint.testing.folders import safetensors_header, write_checkpoint, write_safetensors
from ckptlint.testing.pickles import torch_archive

__all__ = ["Case", "checkpoint_of_ranks", "described", "fixture_cases", "load_folder", "open_case", "read_cases"]
__all__ += ["run_case", "safetensors_header", "torch_archive", "write_checkpoint", "write_safetensors"]
