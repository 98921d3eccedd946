"""`d3serve models`, `pull` and `check`: checkpoints that are published, fetched, or here."""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from d3serve.commands.options import Revision
from d3serve.commands.terminal import plain, printing

TABLE_WIDTH: Final = 100  # at least, whatever the terminal's: a checkpoint's name cut to fit cannot be pulled


def models() -> None:
    """List the published checkpoints: what each needs, and why some cannot be served."""
    from d3serve.model.registry import PUBLISHED

    table = Table("checkpoint", "revision", "weights", "attention", "GPU memory", box=None, pad_edge=False)
    for each in PUBLISHED:
        row = (each.repository, each.revision or "newest", each.weights, each.attention_mode)
        table.add_row(*row, f"{each.memory_gib} GiB", style="dim" if each.refusal else None)
    with printing() as screen:
        screen.width = max(screen.width, TABLE_WIDTH)
        screen.print(table)
        for each in PUBLISHED:
            if each.refusal:
                screen.print(
                    f"{each.repository} cannot be served: {each.refusal}", markup=False, soft_wrap=True
                )


def pull(
    model: Annotated[str, typer.Argument(help="Hub id of the checkpoint.")],
    revision: Revision = None,
    with_code: Annotated[
        bool, typer.Option(help="Also fetch the code that renders its prompts; it is not run.")
    ] = False,
) -> None:
    """Download a checkpoint, or resume a download, and print its folder."""
    from d3serve.model.hub import locate

    with printing() as screen:
        screen.print(str(locate(model, revision, with_code=with_code).folder), markup=False, soft_wrap=True)


def check(
    package: Annotated[Path, typer.Argument(help="Folder of a checkpoint.", exists=True, file_okay=False)],
) -> None:
    """Check a checkpoint's files against its manifest and describe it; exit with 1 if anything differs."""
    from d3serve.model.manifest import check_package

    report = check_package(package)
    parts = ", ".join(f"{part} {n:,}" for part, n in report.parameters.items())
    facts = {
        "attention mode": f"{report.attention_mode}, prompt layout {report.prompt_layout or 'd3'}",
        "layers": f"{report.layers}, hidden size {report.hidden}, weights {report.weights}",
        "validated length": str(report.validated_length or "not declared"),
        "parameters": parts,
    }
    with printing() as screen:
        for name, value in facts.items():
            screen.print(f"{name:<18}{plain(value)}", soft_wrap=True)
        for problem in report.problems:
            screen.print(f"[red]{'differs':<18}[/red]{plain(problem)}", soft_wrap=True)
        if not report.problems:
            screen.print(f"{'manifest':<18}all {report.files_checked} files agree")
    raise typer.Exit(1 if report.problems else 0)
