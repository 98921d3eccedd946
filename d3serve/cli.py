"""The `d3serve` command. Rooms are imported inside the command that needs them: `ask` never loads torch."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from d3serve import __version__, api_keys
from d3serve import ask as asking
from d3serve.demo import REQUEST, TRUTHS
from d3serve.descriptors import raise_descriptor_limit
from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.logs import write_or_lose
from d3serve.operate import operate
from d3serve.settings import Settings
from d3serve.store.connect import server_of
from d3serve.surroundings import leave_start_folder, tidy_environment
from d3serve.terminal import degrade, messages, plain, printing
from d3serve.up import supervisor
from d3serve.up.local import run_apis, running

app = typer.Typer(
    name="d3serve",
    help="Serve decision models: post a state and typed questions, get answers with probabilities.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = messages()
TABLE_WIDTH = 100  # at least, whatever the terminal's: a checkpoint's name cut to fit cannot be pulled
DEFAULT_URL = "http://127.0.0.1:8000"

app.add_typer(operate, name="jobs")

Model = Annotated[str | None, typer.Option(help="Local folder or Hub id of the checkpoint.")]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the checkpoint.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Quantization = Annotated[str | None, typer.Option(help="fp8: quantize unquantized weights while loading.")]
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


def _print_version(wanted: bool) -> None:
    if wanted:
        with printing() as screen:
            screen.print(f"d3serve {__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    trust_remote_code: TrustRemoteCode = None,
    redis_url: RedisUrl = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
) -> None:
    """Run broker (unless --redis-url is given), API, worker and webhook sender in one process tree."""
    settings = _settings(locals())
    leave_start_folder()
    with running(settings) as (tree, url):
        console.print(f"d3serve is ready: [bold]{url}[/bold]")
        tree.run()


@app.command()
def api(
    redis_url: RedisUrl = None,
    host: Host = None,
    port: Port = None,
    model: Model = None,
    processes: Annotated[int | None, typer.Option(help="Number of processes sharing the port.")] = None,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run only the HTTP API."""
    settings = Settings.load(redis_url=redis_url, host=host, port=port, model=model, api_processes=processes)
    server_of(settings)
    leave_start_folder()
    if fd is None and settings.api_processes > 1:
        run_apis(settings)
        return
    from d3serve.api.main import api_main

    if exit_with_parent:
        supervisor.exit_with_parent()
    api_main(settings, fd=fd)


@app.command()
def webhooks(redis_url: RedisUrl = None, exit_with_parent: ExitWithParent = False) -> None:
    """Run the webhook sender: deliver the events of finished jobs, with retries."""
    settings = _settings(locals(), leave_out=("exit_with_parent",))
    leave_start_folder()
    from d3serve.webhooks.main import webhooks_main

    if exit_with_parent:
        supervisor.exit_with_parent()
    raise typer.Exit(webhooks_main(settings))


@app.command("new-key")
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


@app.command()
def worker(
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    trust_remote_code: TrustRemoteCode = None,
    lanes: Lanes = None,
    redis_url: RedisUrl = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run one worker: load the model, then process jobs until stopped."""
    settings = _settings(locals(), leave_out=("exit_with_parent",))
    leave_start_folder()
    from d3serve.worker.main import worker_main

    if exit_with_parent:
        supervisor.exit_with_parent()
    raise typer.Exit(worker_main(settings))


@app.command()
def ask(
    request: Annotated[Path | None, typer.Argument(help="A JSON file with `state` and `questions`.")] = None,
    state: Annotated[str | None, typer.Option(help="The state, as text.")] = None,
    yes_no: Annotated[list[str] | None, typer.Option(help="A yes/no question; repeatable.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="A choice: 'question: option | option'; repeatable.")
    ] = None,
    score: Annotated[
        list[str] | None, typer.Option(help="A score: 'question: lowest | … | highest'; repeatable.")
    ] = None,
    questions: Annotated[
        str | None, typer.Option(help="Questions as the HTTP API has them: a JSON object, by name.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the finished job as JSON instead of a table.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Ask a running server: post a job, wait for it and print the answers."""
    flags = state is not None or yes_no or choice or score or questions is not None
    if request and flags:
        raise InvalidRequest("give a request file or --state with questions, not both", field="request")
    body = (
        asking.read_request(request)
        if request
        else asking.build_request(state, yes_no or (), choice or (), score or (), questions)
    )
    job = asking.ask(url, body, api_key=_key(api_key, api_key_file), console=console)
    raise typer.Exit(0 if _printed(job, as_json=as_json) else 1)


@app.command()
def submit(
    requests: Annotated[
        Path, typer.Argument(help="JSON Lines file; each line is a request with `state` and `questions`.")
    ],
    out: Annotated[
        Path, typer.Option(help="Results as JSON Lines; requests that already have a result are skipped.")
    ],
    at_once: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs in flight.")] = 64,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Submit many jobs and collect their results; run it again to resume."""
    from d3serve.bulk import submit_file

    key = _key(api_key, api_key_file)
    failed = submit_file(requests, out, url=url, api_key=key, at_once=at_once, console=console)
    raise typer.Exit(1 if failed else 0)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def demo(model: Model = None, data_dir: DataDir = None) -> None:
    """Start everything on a free port, post one real job over HTTP, print its answers and stop."""
    settings = Settings.load(model=model, data_dir=data_dir, port=0, log_level="warning")
    leave_start_folder()
    with running(settings) as (_, url):
        console.print(f"broker, API and worker are up at [bold]{url}[/bold]; POST {url}/v1/jobs:")
        console.print_json(data=REQUEST)
        job = asking.ask(url, REQUEST, api_key=None, console=console)
        raise typer.Exit(0 if _printed(job, truths=TRUTHS) else 1)


def _printed(
    job: Mapping[str, Any], *, as_json: bool = False, truths: Mapping[str, str] | None = None
) -> bool:
    """Print a finished job; true if it succeeded."""
    if as_json:
        return asking.show_json(job)
    with printing() as screen:
        return asking.show(job, screen, truths)


def _key(key: str | None, file: Path | None) -> str | None:
    """The API key: given, or the text of a file. Given wins, for it stands closer."""
    if key or file is None:
        return key
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the API key in {file}: {error}", field="api_key_file") from None


def _settings(flags: dict[str, Any], leave_out: tuple[str, ...] = ()) -> Settings:
    return Settings.load(**{name: value for name, value in flags.items() if name not in leave_out})


def main() -> None:
    """Run the command; an error of our own is one line on standard error, never a traceback."""
    degrade()
    raise_descriptor_limit()
    write_or_lose()
    tidy_environment()
    try:
        app()
    except D3ServeError as error:
        console.print(f"[red]error[/red] {plain(error.message)}", soft_wrap=True)
        sys.exit(2)
