"""`ckptlint live`: a check with all ranks of a job."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptlint.commands.check import emitter, judge, requested
from ckptlint.commands.shared import ENVIRONMENT, WithSettings, check_options, progress, say
from ckptlint.errors import CkptlintError
from ckptlint.live.shared_check import joined


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("path")
@click.option("--every-node", is_flag=True, help="Read the whole payload on every node, bypassing its page cache.")
@click.option("--digest", is_flag=True, help="Short for --depth data.")
@click.option(
    "--settle",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="Wait at most this long until all nodes see the same files.",
)
@check_options(but=["all-steps", "before"])
def live(path: str, every_node: bool, digest: bool, settle: float, **options: Any) -> None:
    """Check a checkpoint with all ranks of a job: every node must see the same files.

    Run `torchrun --nproc-per-node N -m ckptlint live PATH`, on one node or many; one process alone is a job too. At
    depths headers and data the ranks share the reading. Rank 0 prints, and every rank ends with the same exit code.
    """
    with joined(every_node, settle, say) as job:
        if digest:
            options["depth"] = "data"
        if options["jobs"] is None:
            options["jobs"] = job.threads
        if options["seed"] is None:
            options["seed"] = job.seed
        try:
            emit = emitter(options, looks_for_folders=False)
            request = requested(options, "job").only(path)
            with progress(options["no_progress"] or job.rank > 0):
                report = judge(request, job.source)
            emit(report)
            if job.said and not options["quiet"]:
                say(job.said)
        except CkptlintError:
            job.send_exit_code(4)
            raise
        job.send_exit_code(report.exit_code)
        sys.exit(report.exit_code)
