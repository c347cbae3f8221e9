"""The runs of a scaling test: one config at several numbers of nodes, for a few steps each, as the points of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.planner.plan import on_nodes

RECORDS = 10  # lines that each run logs
NAME = "-scale"
LONGEST_NAME = 64


def sizes_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to and with `most`."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]


def scaling_configs(config: Config, sizes: Sequence[int], *, strong: bool, steps: int) -> list[Config]:
    """Return the config of each size.

    Args:
        sizes: numbers of nodes, ascending. The axis that takes what others leave grows with them, or the data-parallel one.
        strong: the global batch stays the same; otherwise it is that of the config at its own number of nodes, and grows
            and shrinks with them (weak scaling).
        steps: of each run.

    Raises:
        ConfigError: it trains nothing, has no queue, or cannot be on one of these sizes.
    """
    if config.job.kind != JobKind.TRAIN:
        raise ConfigError(f"scale works with the built-in trainer, but job.kind is {config.job.kind}", hint="job=train")
    if config.cluster.backend == Backend.LOCAL:
        raise ConfigError(
            "cluster.backend=local has one node, so there is nothing to compare",
            hint="a cluster with SLURM, or one on this machine: sandbox up, and +cluster=sandbox",
        )
    return [_at(config, nodes, strong=strong, steps=steps) for nodes in sizes]


def _at(config: Config, nodes: int, *, strong: bool, steps: int) -> Config:
    usual = config.cluster.node_range.most
    batch = config.train.global_batch_size * nodes
    if not strong and batch % usual:
        raise ConfigError(
            f"train.global_batch_size={config.train.global_batch_size} on {usual} nodes is not a whole number of sequences on "
            f"{nodes}",
            hint=f"a multiple of {usual}, or --strong",
        )
    train = dataclasses.replace(
        config.train,
        steps=steps,
        global_batch_size=config.train.global_batch_size if strong else batch // usual,
        log_every=max(1, steps // RECORDS),
        eval_every=0,
        tensorboard=False,
    )
    sized = on_nodes(dataclasses.replace(config, train=train), nodes)
    if isinstance(sized, str):
        raise ConfigError(
            f"{nodes} nodes: {sized}", hint="other sizes: --nodes 1,2,4; or another train.global_batch_size"
        )
    saving = dataclasses.replace(config.checkpoint, every_steps=0, every_minutes=0.0, auto=False, export_every_steps=0)
    sized = dataclasses.replace(
        sized,
        job=dataclasses.replace(config.job, name=config.job.name[: LONGEST_NAME - len(NAME)] + NAME, singleton=False),
        checkpoint=saving,
        optim=dataclasses.replace(config.optim, warmup_steps=min(config.optim.warmup_steps, steps)),
        requeue=dataclasses.replace(config.requeue, mode=RequeueMode.OFF, in_place=False, standby_ranks=False),
    )
    validate(sized)
    return sized


def parse_sizes(text: str) -> list[int]:
    """Return the numbers of nodes that a person has typed: "1,2,4".

    Raises:
        UsageError: they are no numbers, or only one.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"--nodes {text}: expected numbers of nodes", hint="--nodes 1,2,4,8")
    sizes = sorted({int(word) for word in words})
    if len(sizes) < 2:
        raise UsageError(f"--nodes {text}: expected at least two sizes", hint="--nodes 1,2,4,8")
    return sizes
