"""Requests and bytes of a check of a remote checkpoint at each depth: `python bench/speed/remote.py --files 256`.

Writes a DCP checkpoint with one payload file per rank through torch's own planner and writer, puts it on moto's S3
server (a process of its own on this machine) and on a web server, and counts on a proxy before them.
Needs the dev extra.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "storage"))

from loopback import BUCKET, CREDENTIALS, Server, client, files_of, forwarded_to, moto, serving, upload
from tabulate import tabulate

import ckptlint
from ckptlint.depth import Depth


def write(folder: Path, files: int, tensors: int, rows: int) -> None:
    """A checkpoint of so many files: every rank's plan and payload as torch writes them, one rank after the other."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    shape = torch.Size([rows * files, 64])

    class Ranks(DefaultSavePlanner):
        """Hands out the same block of numbers for every item."""

        def resolve_data(self, write_item: WriteItem) -> Any:
            return torch.randn(rows, 64)

    def plan(rank: int) -> SavePlan:
        offsets = torch.Size([rank * rows, 0])
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size([rows, 64])), TensorProperties(dtype=torch.float32), shape
        )
        names = (f"model.layers.{i}.mlp.w1.weight" for i in range(tensors))
        indices = (MetadataIndex(name, offsets) for name in names)
        return SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data) for index in indices])

    plans, metadata = create_default_global_save_plan([plan(rank) for rank in range(files)])
    metadata.planner_data = flatten_state_dict({})[1]
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    folder.mkdir()
    planner = Ranks()
    prepared = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(part, planner).value() for part in prepared])


def measured(server: Server, url: str, depth: Any) -> list[Any]:
    """One row: where, depth, verdict, requests by kind, bytes, seconds."""
    server.asked.clear()
    started = time.perf_counter()
    report = ckptlint.check(url, depth=depth)
    seconds = time.perf_counter() - started
    listings = sum(1 for request in server.asked if not request.name)
    payload = sum(request.sent for request in server.asked if request.name.endswith(".distcp"))
    heads, gets = len(server.names("HEAD")), len(server.names("GET"))
    scheme = url.partition(":")[0]
    return [scheme, depth, report.verdict, listings, heads, gets, server.sent, payload, round(seconds, 2)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, moto(page=1000) as port:
        folder = Path(place) / "step-1"
        write(folder, options.files, options.tensors, options.rows)
        files = list(folder.iterdir())
        size = sum(file.stat().st_size for file in files)
        metadata = (folder / ".metadata").stat().st_size
        upload(client(port), folder, "run/step-1")
        os.environ.update(CREDENTIALS)
        rows = []
        with serving(forwarded_to(port)) as store, serving(files_of(Path(place))) as web:
            os.environ["AWS_ENDPOINT_URL"] = store.url
            ckptlint.check(f"s3://{BUCKET}/run/step-1", depth="metadata")  # imports, first connection
            for depth in Depth:
                rows.append(measured(store, f"s3://{BUCKET}/run/step-1", depth))
            for depth in Depth:
                rows.append(measured(web, f"{web.url}/step-1", depth))
    chunks = options.files * options.tensors
    print(f"{len(files) - 1} payload files, {chunks:,} records, {size:,} bytes, of them {metadata:,} in .metadata")
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores\n")
    header = ["store", "depth", "verdict", "LIST", "HEAD", "GET", "bytes", "of payload", "s"]
    print(tabulate(rows, header, tablefmt="github", intfmt=","))


if __name__ == "__main__":
    main()
