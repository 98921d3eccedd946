"""Renders a package's chat template in a process of its own: a template is a program, and may be a hostile one.

The environment is that of transformers' `apply_chat_template`. Its sandbox keeps a template from files and modules,
but not from looping for ever, nor from building a string of any size; the limits of a process do.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from d3serve.errors import InvalidCheckpoint

FILE = "chat_template.jinja"
CPU_S, MEMORY_BYTES = 5, 512 * 2**20  # a published template takes 10 ms and 30 MB
WALL_S = 120  # on a machine that does much else
MAX_CHARACTERS = 100_000  # what comes back of a text


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template, or the beginning of what it would write.

    Raises:
        InvalidCheckpoint: it raises an error, or takes more time or memory than any template needs.
    """
    command = [sys.executable, "-P", "-m", __name__]
    told = json.dumps({"template": template, "variables": variables, "limits": (CPU_S, MEMORY_BYTES)})
    try:
        done = subprocess.run(  # noqa: S603 - our own module, no shell
            command, input=told.encode(), capture_output=True, timeout=WALL_S, check=False
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        answer = {}
    if "text" in answer:
        return str(answer["text"])
    reason = answer.get("error", f"it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB")
    raise InvalidCheckpoint(f"{FILE} cannot be rendered: {reason}", field=FILE)


def environment() -> Any:
    """The environment that templates are written for: transformers' own, without what it notes for training."""
    from jinja2 import TemplateError, nodes  # noqa: PLC0415 - needed in the child alone
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.parser import Parser  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained to write; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 - the library's own way

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # local time, as there
    }
    return made


def main() -> None:
    """The child: template and variables from standard input, its text or its error to standard output."""
    told = json.load(sys.stdin)
    for limit, most in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), told["limits"], strict=True):
        with suppress(ValueError, OSError):  # already lower, or macOS, which knows no RLIMIT_AS
            resource.setrlimit(limit, (most, most))
    try:
        text = environment().from_string(told["template"]).render(**told["variables"])
        json.dump({"text": text[:MAX_CHARACTERS]}, sys.stdout)
    except Exception as error:  # it raises what it divides by, loops over, lacks
        json.dump({"error": " ".join(f"{type(error).__name__} {error}".split())[:300]}, sys.stdout)


if __name__ == "__main__":
    main()
