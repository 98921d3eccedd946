"""What the command line prints: any text on any terminal, pipe or file, shown as it is and never to its harm."""

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn

from d3serve.errors import InvalidRequest

ENDLESS: Final = 1_000_000  # columns: where nobody looks at a screen, nothing is cut or wrapped to fit one
# Formatting characters that turn the order of what follows; others, like the joiner in emoji, belong to texts.
_TURNING: Final = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c")


def plain(text: str) -> str:
    """`text` as markup that shows it letter for letter: brackets are no markup, control characters are written out."""
    shown = (c if unicodedata.category(c) not in {"Cc", "Cs", "Zl", "Zp"} and c not in _TURNING else _written(c)
             for c in text)  # fmt: skip
    return escape("".join(shown))


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()


def degrade() -> None:
    """Let a terminal or pipe whose encoding lacks a character show its code; by default Python raises."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # none, or somebody else's
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def screen(file: IO[str] | None = None) -> Console:
    """A console on standard output, or on `file`, that shows texts as they are: `:key:` is no picture of a key."""
    wide = not (file or sys.stdout).isatty()
    return Console(file=file, emoji=False, highlight=False, width=ENDLESS if wide else None)


@contextmanager
def printing() -> Iterator[Console]:
    """A screen on standard output. A reader that goes away ends the command quietly.

    Raises:
        InvalidRequest: what was printed cannot be written.
    """
    try:
        yield screen()
        sys.stdout.flush()
    except OSError as error:
        _let_go_of_output()
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        raise InvalidRequest(f"cannot write the output: {error.strerror}", field="stdout") from None


def _let_go_of_output() -> None:
    """What is left in the buffer would be written once more at the end, and fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def bar(console: Console, *columns: str | ProgressColumn, stays: bool = False) -> Progress:
    """A progress bar on a terminal, gone when its block ends unless it `stays`; on a pipe it writes nothing."""
    return Progress(*columns, console=console, transient=not stays, disable=not console.file.isatty())


def tell_error(text: str) -> None:
    """One line on standard error that says what is wrong."""
    messages().print(f"[red]error[/red] {plain(text)}", soft_wrap=True)


def messages() -> Console:
    """A console on standard error, for what a person is told beside the output."""
    return Console(stderr=True, emoji=False, highlight=False)
