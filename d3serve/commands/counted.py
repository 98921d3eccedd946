"""What `d3serve ask --dry-run` prints: tokens, lane, refusals and an estimate, for people or as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from d3serve.commands.terminal import plain, printing


def show_count(count: Mapping[str, Any], *, as_json: bool) -> bool:
    """Print what a request would read; true if a job of it would be answered whole."""
    with printing() as console:
        if as_json:
            unicode = console.encoding.startswith("utf")
            console.file.write(json.dumps(count, indent=2, ensure_ascii=not unicode) + "\n")
            return bool(count["fits"])
        if count["questions"]:
            table = Table(title=plain(count["model"]))
            for column in ("question", "tokens", "whole prompt"):
                table.add_column(column, overflow="fold")  # never cut
            for name, tokens in count["questions"].items():
                table.add_row(plain(name), f"{tokens['tokens']:,}", f"{tokens['prompt_tokens']:,}")
            console.print(table)
            console.print(
                f"state of {count['state_tokens']:,} tokens; {count['total_tokens']:,} with all questions, of "
                f"{count['limits']['job']:,} that a job may have; lane {count['lane']}",
                highlight=False,
            )
        for refusal in count["refused"]:
            console.print(
                f"[red]refused[/red] {plain(refusal['code'])}: {plain(refusal['message'])}",
                highlight=False,
                soft_wrap=True,
            )
        if estimate := count["estimate"]:
            console.print(
                f"at today's rate {estimate['queue_s']:g} s in the queue and {estimate['work_s']:g} s of work",
                highlight=False,
            )
    return bool(count["fits"])
