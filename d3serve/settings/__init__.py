"""Every setting of every process: one frozen object, read from `D3SERVE_*` once at start."""

import json
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from d3serve.errors import InvalidSettings
from d3serve.settings.redis_url import RedisURL
from d3serve.text.wording import complaint

PREFIX = "D3SERVE_"
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's, not ours: it is read when that is imported
CLIENT_VARIABLES = frozenset(
    {"D3SERVE_URL", "D3SERVE_API_KEY", "D3SERVE_API_KEY_FILE"}
)  # of `ask` and `submit`
# An empty variable is as good as none, as `${X:-}` of a compose file means it; here that would let everyone in.
NEVER_EMPTY: Final = "D3SERVE_API_KEYS_FILE"
# Kubernetes gives pods D3SERVE_SERVICE_HOST, D3SERVE_PORT=tcp://10.0.0.1:80 and more for a Service called d3serve.
SERVICE_LINK: Final = re.compile(
    r"D3SERVE(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT(_\d+_\w+?)?=(tcp|udp|sctp)://.*|PORT_\d+_\w+_(PROTO|PORT|ADDR)=.*)"
)
# Settings of before, constants now: whoever still sets one is not asked whether he meant its neighbour.
GONE: Final = frozenset(
    PREFIX + name for name in (
        "BROKER_MAX_MEMORY_BYTES", "IDEMPOTENCY_TTL_S", "LEASE_S", "LOG_FORMAT", "MAX_ATTEMPTS",
        "MAX_BATCH_QUESTIONS", "MAX_JSON_DEPTH", "MAX_QUESTIONS_PER_JOB", "MAX_QUESTION_ID_CHARS",
        "MAX_QUEUED_BYTES", "MAX_WAIT_S", "SPECIAL_TOKENS_IN_TEXT", "SYNC_WAIT_S", "TOMBSTONE_TTL_S",
        "TURN_LIMIT_S", "WEBHOOK_TIMEOUT_S",
    )
)  # fmt: skip
BUNDLED: Final = "demo-d3"  # the small checkpoint that travels with the package, under this name
BUNDLED_FOLDER: Final = Path(__file__).parents[1] / "checkpoints" / BUNDLED
MOST_WORKERS: Final = 64  # of one `up`; no host has more GPUs
A_FOLDER: Final = ("/", ".", "~")  # how a model's name begins that cannot be a Hub id


class Settings(BaseSettings):
    """The settings; each field is also the variable `D3SERVE_<FIELD>` and, where it makes sense, a flag."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    # where things are
    redis_url: str | None = Field(
        default=None,
        description="Redis-protocol server (redis://, rediss://, unix://, sentinel://). Unset: `d3serve up` starts "
        "one.",
    )
    namespace: str = Field(
        default="default",
        pattern=r"^[a-z0-9-]{1,32}$",
        description="Name of this queue inside the server; every key begins with d3:{<namespace>}:.",
    )
    data_dir: Path | None = Field(
        default=None,
        description="Folder of the embedded broker's socket, log and append-only file; only its owner may write to it. "
        "Unset: ~/.local/share/d3serve.",
    )
    state_dir: Path | None = Field(
        default=None,
        description="Folder for large states that every API process and worker sees. Unset: `d3serve up` with a broker "
        "of its own uses <data_dir>/states; else Redis holds them.",
    )
    host: str = Field(default="127.0.0.1", description="Address the API binds to.")
    api_processes: int = Field(
        default=1, ge=1, le=64, description="API processes that share the port, on one host."
    )
    port: int = Field(default=8000, ge=0, le=65_535, description="Port the API binds to; 0 picks a free one.")

    # who may call
    api_keys_file: Path | None = Field(
        default=None,
        description="File of API keys, made by `d3serve new-key`. Unset: no key is asked for.",
    )
    allow_anonymous: bool = Field(
        default=False,
        description="Serve callers without a key even on an address that other hosts reach.",
    )
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^(\*|[a-z0-9.-]+)$")], ...] = Field(
        default=(),
        description="Names under which callers without a key, web pages too, may reach the API; this host's own names "
        "and addresses always may. *: any name, so any web page that a caller's browser opens.",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, description="Requests a key may send in a minute, unless its line says otherwise."
    )

    # the model
    model: str = Field(
        default="vllm-sr/d3-turbo",
        description="Local folder or Hub id of the checkpoint that workers load; demo-d3 is the small one that comes "
        "with d3serve.",
    )
    revision: str | None = Field(default=None, description="Hub revision; unset: the pinned one.")
    load_format: Literal["safetensors", "random"] = Field(
        default="safetensors",
        description="random: draw the weights at the package's geometry and read none, to measure speed and memory.",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Type of weights and activations. Unset: bfloat16 on cuda, and on a CPU with avx512_bf16 or AMX "
        "for models 1,024 wide or more; else float32.",
    )
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Where the model runs. Unset: cuda if there is one, else cpu."
    )
    workers: Literal["auto"] | int = Field(
        default=1,
        description="Workers that `d3serve up` starts, each on a GPU of its own. auto: one for every GPU that CUDA "
        "shows. Without a GPU they share the cores, and auto is 1.",
    )
    model_alias: tuple[str, ...] = Field(
        default=("jev-latest",),
        description="Other names under which clients may ask for the model (the stock SDK sends jev-latest).",
    )
    quantization: Literal["fp8", "fp8-all"] | None = Field(
        default=None,
        description="fp8: quantize plain weights while loading, as published FP8 packages are; those need no flag. "
        "fp8-all: the inputs of linear layers too, faster and further from BF16.",
    )
    linear_rule: Literal["ours", "fla"] | None = Field(
        default=None,
        description="Gated delta rule of the linear layers on a GPU: ours, or flash-linear-attention's. Unset: ours on "
        "a Hopper, on which it was tuned; on other GPUs fla's, where it is installed.",
    )
    attention: Literal["ours", "fa3", "fp8"] | None = Field(
        default=None,
        description="Who attends to long states. ours: cuDNN's and our kernel. fa3: FlashAttention-3, on a Hopper. "
        "fp8: that in FP8, which changes answers. Unset: fa3 where it is installed, else ours.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Let a package's own d3_format.py render prompt layouts that d3serve does not know.",
    )

    # limits of one request
    max_body_bytes: int = Field(
        default=16 * 2**20,
        ge=1024,
        description="Largest decoded request body. An API process holds 128 MiB of bodies at once, or eight of the "
        "largest, and needs four times as much memory for them.",
    )
    max_interactive_tokens: int = Field(
        default=32_768, ge=16, description="Longest prompt of the interactive lane, in tokens."
    )
    max_offline_tokens: int = Field(
        default=131_072, ge=16, description="Longest prompt of the offline lane, in tokens."
    )
    max_job_tokens_interactive: int = Field(
        default=131_072,
        ge=16,
        description="Most tokens of one interactive job: its state once, and all its questions. Only short jobs "
        "of others run meanwhile.",
    )
    max_job_tokens_offline: int = Field(
        default=1_048_576, ge=16, description="Most tokens of one offline job, counted alike."
    )

    # the queue
    max_queued_jobs: int = Field(default=100_000, ge=1, description="Jobs that may wait; more get 429.")
    max_queued_jobs_per_tenant: int = Field(
        default=50_000,
        ge=1,
        description="Jobs of one tenant that may wait, so that none fills the queue; more get 429.",
    )
    max_kept_bytes_per_tenant: int = Field(
        default=2**30,
        ge=2**20,
        description="Bytes of one tenant's jobs, waiting or ended, in Redis and in files of states, so that none fills "
        "either; more get 429. Half of the embedded broker's memory. All that wait may take 1 GiB, or as much as one "
        "tenant where that is more.",
    )
    result_ttl_s: int = Field(
        default=86_400, ge=60, description="How long a result is kept, from completion."
    )
    max_result_ttl_s: int = Field(
        default=7 * 86_400,
        ge=60,
        le=7 * 86_400,
        description="Longest that a client may ask for a result to be kept; it bounds the default too.",
    )
    stop_grace_s: float = Field(
        default=25.0,
        ge=0,
        description="How long a worker that is told to stop may go on with its turn. Less, by the few seconds that it "
        "takes to leave, than your platform waits before it kills: Kubernetes 30 s, Docker 10 s unless told otherwise.",
    )
    lanes: tuple[Literal["interactive", "offline"], ...] = Field(
        default=("interactive", "offline"), description="Lanes that this worker serves."
    )

    # webhooks
    webhook_allow: tuple[str, ...] = Field(
        default=(),
        description="Networks (CIDR) that webhooks may reach although they are not public, and over plain http.",
    )

    # the turn
    max_batch_tokens: int = Field(
        default=16_384, ge=16, description="Token budget of a turn, and of each of its passes."
    )
    state_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Memory of the state cache. Unset: a share of the device's free memory.",
    )
    state_cache_host_bytes: int = Field(
        default=0,
        ge=0,
        description="Pinned host memory for states that the device's cache had to let go; 0 keeps none.",
    )

    state_cache_dir: Path | None = Field(
        default=None,
        description="Folder, on a fast local drive, for states of 4,096 tokens or more that are asked about again: "
        "their files outlive a worker, and all workers of a host may share it. A file stays for result_ttl_s after its "
        "last use; all of them take at most as much as they leave free. Unset: none is kept.",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level logged. Logs are JSON, but on a terminal."
    )

    @field_validator("redis_url")
    @classmethod
    def _readable(cls, url: str | None) -> str | None:
        if url is not None:
            RedisURL.parse(url)
        return url

    @field_validator("workers", mode="before")
    @classmethod
    def _is_auto_or_a_number(cls, value: Any) -> Any:
        text = str(value)
        if text != "auto" and not (text.isdecimal() and len(text) <= 2 and 1 <= int(text) <= MOST_WORKERS):
            raise ValueError(f"must be auto or a number from 1 to {MOST_WORKERS}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _says_something(cls, value: Any) -> Any:
        """Refuse a blank text: a flag like `--model "$UNSET"`, which would name the current folder."""
        if isinstance(value, str) and not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _stays_where_it_is(cls, value: Any, info: ValidationInfo) -> Any:
        """Make paths absolute: a process leaves the folder that it was started in."""
        if isinstance(value, Path):
            return _absolute(value)
        if info.field_name == "model":
            if value.startswith(A_FOLDER) or os.path.isdir(value):  # Path's own raises where a name is long
                return str(_absolute(Path(value)))
            if value == BUNDLED:
                return str(BUNDLED_FOLDER)
        return value

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read the environment, let `overrides` that are not None win, refuse unknown `D3SERVE_*` names.

        Raises:
            InvalidSettings: names the variable or field and what is wrong with it.
        """
        _check_names({PREFIX + name.upper() for name in cls.model_fields} | CLIENT_VARIABLES)
        try:
            return cls(**{k: v for k, v in overrides.items() if v is not None})
        except SettingsError as error:  # of a list; the message quotes the field and has it nowhere else
            name = str(error).split('"')[1]
            raise InvalidSettings(f"{PREFIX}{name.upper()} must be a JSON list", field=name) from None
        except ValidationError as error:
            raise _refusal(error.errors()[0]) from None

    def data_folder(self) -> Path:
        """`data_dir`, else the usual one in the home folder.

        Raises:
            InvalidSettings: this user has no home folder.
        """
        try:
            return self.data_dir or Path("~/.local/share/d3serve").expanduser()
        except RuntimeError:
            raise InvalidSettings(
                "no home folder for the embedded broker's data: choose one with --data-dir (D3SERVE_DATA_DIR)",
                field="data_dir",
            ) from None

    def to_env(self) -> dict[str, str]:
        """The same settings as environment variables, for a child process."""
        dumped = self.model_dump(mode="json", exclude_none=True)
        return {
            PREFIX + name.upper(): value if isinstance(value, str) else json.dumps(value)
            for name, value in dumped.items()
        }


def _check_names(known: set[str]) -> None:
    """Refuse a variable that would be ignored, or that would open the API; drop what only looks like one of ours."""
    for name, value in list(os.environ.items()):
        if SERVICE_LINK.fullmatch(f"{name}={value}"):
            del os.environ[name]
    unknown = sorted(k for k in os.environ if k.upper().startswith(PREFIX) and k.upper() not in known)
    if unknown and unknown[0].upper() in GONE:
        raise InvalidSettings(
            f"{unknown[0]} is no setting any more: unset it; CHANGELOG.md says what holds now",
            field=unknown[0],
        )
    if unknown:
        near = get_close_matches(unknown[0].upper(), sorted(known), n=1, cutoff=0.8)
        advice = f"did you mean {near[0]}?" if near else "see docs/settings.md"
        raise InvalidSettings(f"unknown setting {unknown[0]}: {advice}", field=unknown[0])
    if any(k.upper() == NEVER_EMPTY and not value for k, value in os.environ.items()):
        raise InvalidSettings(
            f"{NEVER_EMPTY} is empty: name the file of keys, or unset the variable to ask for no key",
            field="api_keys_file",
        )


def _refusal(error: ErrorDetails) -> InvalidSettings:
    """Pydantic's first complaint in our words; a URL may hold a password and is not shown."""
    name = ".".join(str(part) for part in error["loc"])
    clause = complaint(error)
    if error["type"] == "value_error":
        clause = error["msg"].removeprefix("Value error, ")
    if name == "redis_url":
        clause = str(error.get("ctx", {}).get("error", clause))  # of RedisURL, which quotes nothing
    return InvalidSettings(f"{PREFIX}{name.upper()} {clause}", field=name)


def _absolute(path: Path) -> Path:
    try:
        whole = path.expanduser().absolute()
        str(whole).encode()
    except RuntimeError:
        raise ValueError("names a home folder, and this user has none") from None
    except FileNotFoundError:
        raise ValueError("is a relative path, and the current folder is gone") from None
    except UnicodeEncodeError:
        raise ValueError("must be a path in UTF-8") from None
    return whole
