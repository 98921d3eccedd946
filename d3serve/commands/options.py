"""The options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from d3serve.client.sending import read_key_file

Model = Annotated[
    str | None, typer.Option(help="Local folder or Hub id of the checkpoint; demo-d3 is bundled.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the checkpoint.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Workers = Annotated[
    str | None,
    typer.Option(metavar="auto|N", help="Workers to run, each on a GPU of its own; auto: one for every GPU."),
]
Quantization = Annotated[
    str | None, typer.Option(help="fp8 or fp8-all: quantize unquantized weights while loading.")
]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option(
        "--trust-remote-code", help="Let the package's own code render prompt layouts unknown to d3serve."
    ),
]
Lanes = Annotated[
    list[str] | None, typer.Option("--lane", help="interactive or offline; repeatable. Default: both.")
]
RedisUrl = Annotated[
    str | None, typer.Option(help="URL of a Redis-protocol server. If unset, only `up` starts one.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")]
DataDir = Annotated[  # a text: as a Path an empty one would be the current folder
    str | None, typer.Option(metavar="PATH", help="Folder for the embedded broker's data.")
]
ExitWithParent = Annotated[bool, typer.Option(hidden=True)]
Key = Annotated[
    str | None,
    typer.Option(
        envvar="D3SERVE_API_KEY", help="API key. A flag shows in `ps`: prefer the variable or the file."
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option(envvar="D3SERVE_API_KEY_FILE", help="File that holds the API key instead.")
]
Url = Annotated[str, typer.Option(envvar="D3SERVE_URL", help="URL of a running server.")]


def read_key(key: str | None, file: Path | None) -> str | None:
    """The API key: given, or the text of a file. Given wins, for it stands closer."""
    return key or read_key_file(file)
