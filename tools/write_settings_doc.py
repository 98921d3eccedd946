"""Write docs/settings.md from the settings class; a test compares the two."""

import json
from pathlib import Path

from d3serve.settings import PREFIX, Settings

TARGET = Path(__file__).parents[1] / "docs" / "settings.md"


def render() -> str:
    """The document: one table row for each setting, in the order of the class."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else _as_variable(field.default)
        rows.append(f"| `{PREFIX}{name.upper()}` | `{default}` | {field.description} |")
    return "\n".join(
        [
            "# Settings",
            "",
            "Written by `make docs` from `d3serve/settings.py`. Every process reads them once at start; a flag of the",
            "same name wins over the variable; an unknown `D3SERVE_*` variable is an error. Lists are JSON.",
            "",
            "| variable | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _as_variable(value: object) -> str:
    """Write a default as a variable would hold it."""
    if isinstance(value, str | Path):
        return str(value).replace(str(Path.home()), "~")
    return json.dumps(value)


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
