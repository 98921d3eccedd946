"""`d3serve new-key`: API keys."""

from pathlib import Path
from typing import Annotated

import typer

from d3serve import api_keys
from d3serve.commands.terminal import printing


def new_key(
    file: Annotated[Path, typer.Argument(help="Key file; see D3SERVE_API_KEYS_FILE. Created if missing.")],
    tenant: Annotated[str, typer.Option(help="Tenant whose jobs the key can see.")] = "main",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(api_keys.ALL_SCOPES)}; repeatable. Default: all but admin.",
        ),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Rate limit for this key.")] = None,
) -> None:
    """Create an API key: store its hash in FILE and print the key once."""
    key, line = api_keys.new_key(tenant, scope or api_keys.DEFAULT_SCOPES, requests_per_minute)
    api_keys.append_key(file, line)
    with printing() as screen:
        screen.print(key)
