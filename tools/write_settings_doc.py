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
            "Written by `make docs` from `d3serve/settings/`. Every process reads them once at start; a flag of the",
            "same name wins over the variable. Lists are JSON. An unknown `D3SERVE_*` variable is an error: remove new",
            "ones before you go back to an older version. An empty variable is as good as none, except for",
            "`D3SERVE_API_KEYS_FILE`, where it is an error. Relative paths lead from where the process was started.",
            "",
            "| variable | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _as_variable(value: object) -> str:
    """Write a default as a variable would hold it."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
