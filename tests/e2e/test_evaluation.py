"""`d3serve evaluate` on the bundled cases and the bundled checkpoint, as the README shows it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bundled_cases_are_answered_well_and_a_bad_wording_loses(
    demo_server: str, tmp_path: Path
) -> None:
    folder = ROOT / "docs" / "evaluation"
    lines = (folder / "packages.jsonl").read_text().splitlines(keepends=True)
    cases, page = tmp_path / "packages.jsonl", tmp_path / "page.html"
    cases.write_text("".join(line for line in lines if '"developers"' in line))
    questions, reworded = folder / "questions.json", folder / "reworded.json"
    command = [
        sys.executable, "-m", "d3serve", "evaluate", str(cases), "--questions", str(questions),
        "--against", str(reworded), "--html", str(page), "--json", "--url", demo_server,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    accuracy = {row["name"]: row["accuracy"]["value"] for row in told["figures"]}
    assert accuracy["developers"] > 0.85
    assert accuracy["section"] > 0.85
    assert told["against"]["verdict"].startswith(f"{questions} is better")
    assert "<svg" in page.read_text()


def test_the_documented_frame_gets_its_columns(demo_server: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    script = example.replace("http://127.0.0.1:8000", demo_server)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[1:]
    assert first.split()[1] == "True"
    assert first.endswith("games")
    assert second.endswith("network tools")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
