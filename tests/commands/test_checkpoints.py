"""`d3serve models`, `pull` and `check`, as a person runs them."""

import json
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from d3serve.commands.main import app
from d3serve.model import hub
from d3serve.model.registry import PUBLISHED


def run(*arguments, columns=300):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}, catch_exceptions=False)


@pytest.mark.parametrize("columns", [60, 300])
def test_models_lists_every_published_checkpoint_whole(columns):
    result = run("models", columns=columns)
    assert result.exit_code == 0
    for each in PUBLISHED:
        line, *refusals = [one for one in result.output.splitlines() if one.split()[0] == each.repository]
        assert each.attention_mode in line
        assert [each.refusal in one for one in refusals] == [True] * bool(each.refusal)


def test_check_says_what_a_package_is(tiny_checkpoint):
    result = run("check", str(tiny_checkpoint))
    assert result.exit_code == 0
    assert "prefix_bidir, prompt layout d3" in result.output
    assert "6 (4 linear, 2 full attention)" in result.output
    assert "files agree" in result.output


def test_check_tells_every_difference_and_fails(tiny_checkpoint, tmp_path):
    package = shutil.copytree(tiny_checkpoint, tmp_path / "package")
    (package / "chat_template.jinja").write_text("x")
    (package / "preprocessor_config.json").unlink()
    result = run("check", str(package))
    assert result.exit_code == 1
    assert result.output.count("differs") == 2
    assert "files agree" not in result.output


def test_check_shows_what_a_package_says_letter_for_letter(tiny_checkpoint, tmp_path):
    package = tmp_path / "package"
    shutil.copytree(tiny_checkpoint, package)
    declared = json.loads((package / "decision_config.json").read_text())
    declared["prompt_layout"] = "[/x] \x1b]0;PWN\x07 :key:"
    (package / "decision_config.json").write_text(json.dumps(declared))
    assert r"prompt layout [/x] \x1b]0;PWN\x07 :key:" in run("check", str(package)).output


@pytest.mark.parametrize("with_code", [False, True])
def test_pull_prints_the_folder(with_code, monkeypatch, tmp_path):
    asked = []

    def located(*arguments, **options):
        asked.append((arguments, options))
        return SimpleNamespace(folder=tmp_path)

    monkeypatch.setattr(hub, "locate", located)
    flags = ["--with-code"] if with_code else []
    result = run("pull", "vllm-sr/d3-turbo", "--revision", "main", *flags)
    assert result.output.strip() == str(tmp_path)
    assert asked == [(("vllm-sr/d3-turbo", "main"), {"with_code": with_code})]
