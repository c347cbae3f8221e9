"""The same run on other engines than SLURM: the manifests of `render --target`, and of `submit` on Kubernetes.

An engine starts pods, stops them and starts them again; what it starts in each is `python -m slurmtrain supervise RUN`
(supervise/platforms/pods.py). `pod` has what all of them share; a module for each target has what is its own. The texts are
pure functions of a config and of where its run lies.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from slurmtrain.choices import Backend, Target
from slurmtrain.config.schema import Config
from slurmtrain.launch.targets.pod import PodRun, check

STR = "tag:yaml.org,2002:str"
# Each has `objects(config, run)`, which returns the documents of the manifest.
TARGETS = {target: f"slurmtrain.launch.targets.{target}" for target in Target}


def on_engine(config: Config, target: Target) -> Config:
    """Return the config of the same run on another engine, as its supervisor needs it."""
    pods = dataclasses.replace(config.cluster.pods, target=target)
    return dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, backend=Backend.KUBERNETES, pods=pods)
    )


def manifest(config: Config, run: PodRun, *, placeholders: bool = False) -> str:
    """Return the manifest of a run for the engine that cluster.pods.target names, as YAML.

    Args:
        placeholders: it is only shown, and words stand for the image and the volume if the config has none.

    Raises:
        ConfigError: something that pods need is missing.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes text of several lines, such as a script, as it is."""

    Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar(STR, text, style="|" if "\n" in text else None)
    )
    check(config, run, placeholders=placeholders)
    objects: Callable[[Config, PodRun], list[dict[str, Any]]]
    objects = importlib.import_module(TARGETS[config.cluster.pods.target]).objects
    return "---\n".join(
        yaml.dump(each, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120)
        for each in objects(config, run)
    )
