"""The manual: its pages are current, and can be read on a terminal."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from slurmtrain.cli import main
from slurmtrain.cli.arguments import find_verb, parse
from slurmtrain.cli.help import topics
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.compose import compose
from slurmtrain.config.folders import PACKAGE, shipped
from tests.support.transformers_models import write_small_model

README = PACKAGE.parent / "README.md"
CONTRIBUTING = PACKAGE.parent / ".github" / "CONTRIBUTING.md"
PAGES = sorted((PACKAGE / "docs").glob("*.md"))
WIDEST = 120  # columns of a terminal


def test_the_readme_links_every_page_of_the_manual_and_no_other() -> None:
    linked = set(re.findall(r"\(slurmtrain/docs/([a-z-]+)\.md\)", README.read_text()))
    assert linked == {page.stem for page in PAGES}


def test_links_between_pages_lead_to_pages() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / target.partition("#")[0]).is_file(), f"{path.name}: {target}"


def test_every_page_has_a_title_begins_with_commands_and_ends_with_its_limits() -> None:
    for path in PAGES:
        text = path.read_text()
        assert topics()[path.stem], path
        if path.stem not in ("changelog", "troubleshooting"):
            assert re.match(r"# [^\n]+\n\n    \S", text), f"{path.name} does not begin with commands"
            assert re.findall(r"\n## ([^\n]+)", text)[-1] == "Limits", path.name


def test_the_readme_is_short_and_no_line_is_longer_than_a_terminal_is_wide() -> None:
    assert len(README.read_text().splitlines()) <= 150
    for path in [README, CONTRIBUTING, *PAGES]:
        assert [line for line in path.read_text().splitlines() if len(line) > WIDEST] == [], path.name


def test_no_page_names_a_file_of_the_package_that_is_not_there() -> None:
    for path in [README, CONTRIBUTING, *PAGES]:
        for name in re.findall(r"`((?:slurmtrain|conf|jobs|tests)/[\w./*-]+)`", path.read_text()):
            found = Path(PACKAGE.parent).glob(name.rstrip("/"))
            assert any(found), f"{path.name}: {name}"


def test_every_message_of_the_page_troubleshooting_is_one_of_the_package() -> None:
    texts = [
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts.append(shipped("jobs").joinpath("job.sbatch.j2").read_text())
    messages = re.findall(r"^- `([^`]+)`", (PACKAGE / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 20
    unknown = [
        part for message in messages for part in message.split(" ... ") if not any(part in text for text in texts)
    ]
    assert unknown == []


def shown_commands() -> list[list[str]]:
    """The words behind `python -m slurmtrain` of every command that the README, CONTRIBUTING or a page shows."""
    found = []
    for path in [README, CONTRIBUTING, *PAGES]:
        text = path.read_text().replace("\\\n", "")
        for line in re.findall(r"^    (?:\$ )?python -m slurmtrain (.*)$", text, re.MULTILINE):
            words = shlex.split(line, comments=True)
            words = words[: words.index(">")] if ">" in words else words  # what the shell does with the output
            if "..." not in " ".join(words):
                found.append(words)
    return found


def test_every_command_that_a_page_shows_is_understood(project: Path) -> None:
    for name, text in {
        "cluster/mine": "nodes: 1\n",
        "model/mine": "_target_: a.B\n",
        "data/mine": "_target_: a.B\n",
    }.items():
        (project / "my_conf" / name).parent.mkdir(parents=True)
        (project / "my_conf" / f"{name}.yaml").write_text(text)
    write_small_model(project / "models")
    commands = shown_commands()
    assert len(commands) > 60
    composed: set[tuple[str, ...]] = set()
    for words in commands:
        verb = find_verb(words)
        if "--help" in words:
            assert main(words) == 0
            continue
        parsed = parse(words)
        assert verb or parsed.cfg or parsed.version, words
        if verb == "help":
            assert main(words) == 0
        elif verb is None or (VERBS[verb].composes and not parsed.action):
            if parsed.multirun:  # whose values are choices, which only a sweep composes
                continue
            own = {"config_dir": "my_conf"} if {"=mine"} & {word[-5:] for word in words} else {}
            overrides = tuple(word for word in parsed.overrides if not word.startswith("+secrets."))
            if {"model=hf", "experiment=sft"} & {*overrides}:
                overrides = tuple(re.sub("^model.path=.*", f"model.path={project}/models", word) for word in overrides)
            if overrides not in composed:
                compose(overrides, **own)
            composed.add(overrides)
