"""The recipes in conf/experiment: their commands work as they stand, and they need the memory that they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slurmtrain.cli.arguments import find_verb, parse
from slurmtrain.config.compose import compose
from slurmtrain.config.folders import shipped
from slurmtrain.config.rules import validate
from slurmtrain.launch.script import dry_run
from slurmtrain.planner.fit import ROOM, check_fits, memory_of
from slurmtrain.planner.memory import GIB, in_gb

QWEN3_8B = """{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128,
"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288, "tie_word_embeddings": false,
"max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6}"""  # of its config.json
RECIPES = [path for path in sorted((shipped("conf") / "experiment").glob("*.yaml")) if path.stem != "smoke"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_reaches_and_its_commands_are_valid_as_they_stand(recipe: Path, project: Path) -> None:
    text = recipe.read_text()
    assert re.search(r"Measured: a validation loss of \d|No loss is given, since it was not measured", text)
    folder = project / "models" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(QWEN3_8B)
    text = text.replace("/models/", f"{project}/models/").replace("\\\n#", "")
    commands = [
        shlex.split(line, comments=True) for line in re.findall(r"^#     python -m slurmtrain (.*)$", text, re.M)
    ]
    assert any(command[-1] == "submit" for command in commands)
    for command in commands:
        if find_verb(command) not in ("submit", "plan"):
            continue
        config = compose(parse(command).overrides)
        dims = validate(config)
        check_fits(config, dims)
        assert "slurmtrain" in dry_run(config, project)
        told = re.search(r"a rank needs about (\S+) GB", text)
        if told:
            needed = max(stage.total for stage in memory_of(config, dims) or [])
            assert told[1] == in_gb(needed)
            assert config.cluster.gpu_memory_gb and needed <= ROOM * config.cluster.gpu_memory_gb * GIB, "and has room"
