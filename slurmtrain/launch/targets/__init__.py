"""The same run on other engines than SLURM: the manifests of `render --target`, and of `submit` on Kubernetes.

An engine starts pods, stops them and starts them again; what it starts in each is `python -m slurmtrain supervise RUN`
(supervise/platforms/pods.py). `pod` has what all of them share; a module for each target has what is its own. The texts are
pure functions of a config and of where its run lies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from slurmtrain.choices import Target
from slurmtrain.config.schema import Config
from slurmtrain.launch.targets.pod import PodRun, check

# Each has `objects(config, run)`, which returns the documents of the manifest.
TARGETS = {target: f"slurmtrain.launch.targets.{target}" for target in Target}


def manifest(target: Target | str, config: Config, run: PodRun) -> str:
    """Return the manifest of a run, as YAML.

    Raises:
        ConfigError: pods cannot do what the config asks for, or something that they need is missing.
    """
    import yaml

    check(config, run)
    objects: Callable[[Config, PodRun], list[dict[str, Any]]]
    objects = importlib.import_module(TARGETS[Target(target)]).objects
    return "---\n".join(
        yaml.safe_dump(each, sort_keys=False, default_flow_style=False, width=120) for each in objects(config, run)
    )
