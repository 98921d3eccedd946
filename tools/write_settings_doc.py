"""Write docs/settings.md from the settings class; a test compares the two."""

from pathlib import Path

from d3serve.settings import PREFIX, Settings

TARGET = Path(__file__).parents[1] / "docs" / "settings.md"


def render() -> str:
    """The document: one table row for each setting, in the order of the class."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else str(field.default).replace(str(Path.home()), "~")
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


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
