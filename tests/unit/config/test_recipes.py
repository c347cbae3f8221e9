"""The recipes in conf/experiment: their commands work as they stand, and they need the memory that they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slurmtrain.cli.arguments import parse
from slurmtrain.config.compose import compose
from slurmtrain.config.validate import validate
from slurmtrain.launch.submit import dry_run
from slurmtrain.planner.fit import check_fits, in_gb, memory_of
from slurmtrain.resources import shipped

RECIPES = [path for path in sorted((shipped("conf") / "experiment").glob("*.yaml")) if path.stem != "smoke"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_reaches_and_its_commands_are_valid_as_they_stand(recipe: Path, project: Path) -> None:
    text = recipe.read_text()
    assert re.search(r"Measured: a validation loss of \d|No loss is given, since it was not measured", text)
    commands = re.findall(r"^#     python -m slurmtrain (.*)$", text, re.MULTILINE)
    assert any(shlex.split(command, comments=True)[-1] == "submit" for command in commands)
    for command in commands:
        config = compose(parse(shlex.split(command, comments=True)).overrides)
        dims = validate(config)
        check_fits(config, dims)
        assert "slurmtrain" in dry_run(config, project)
        told = re.search(r"a rank needs about (\S+) GB", text)
        if told:
            assert told[1] == in_gb(max(stage.total for stage in memory_of(config, dims) or []))
