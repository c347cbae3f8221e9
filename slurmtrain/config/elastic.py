"""A job whose number of nodes SLURM chooses (cluster.nodes=2-4): the sizes that can be used, and the config for one of them.

The global batch, the order of the samples and the schedule are the same for every size. Only the micro batches of a rank
follow the number of ranks. Everything that works with a config, on a rank or before the queue, works with that of one
size; what is frozen is the range. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from slurmtrain.choices import JobKind
from slurmtrain.config.parallel_dims import AXES, is_possible, parallel_dims_of
from slurmtrain.config.ranges import NodeRange, nodes_to_use
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, EnvironmentMismatchError

TRAINS = (JobKind.TRAIN, JobKind.EVALUATE)  # kinds of jobs whose batches are divided among the ranks


def usable_sizes(config: Config) -> list[int]:
    """Return the numbers of nodes on which the ranks can run, in ascending order; of a fixed size only that.

    A size is left out if its ranks cannot divide the global batch, or no axis of the layout can take them.

    Raises:
        ConfigError: the least number of nodes is not among them, so that a job could get nodes which it cannot use.
    """
    nodes = config.cluster.node_range
    if not nodes.elastic:
        return [nodes.most]
    sizes = [size for size in range(nodes.least, nodes.most + 1) if is_possible(_with_nodes(config, size))]
    if nodes.least in sizes:
        return sizes
    hint = None
    if -1 not in (getattr(config.parallel, axis) for axis in AXES):
        hint = f"with cluster.nodes={nodes} one axis has to be -1, which takes what the others leave: parallel.dp_replicate=-1"
    elif sizes:
        hint = f"cluster.nodes={NodeRange(sizes[0], nodes.most)} begins with a size that can be used"
    try:
        parallel_dims_of(_with_nodes(config, nodes.least))
    except ConfigError as error:
        raise ConfigError(f"cluster.nodes={nodes}: {error.message}", hint=hint or error.hint) from None
    raise AssertionError("unreachable")


def at_size(config: Config, nodes: int) -> Config:
    """Return the config for this number of nodes, one of `usable_sizes`.

    With a range, and without train.micro_batch_size, a forward pass is never larger than on the most nodes, so that fewer
    nodes need no more memory for it: a rank's larger share becomes several micro batches.
    """
    sized = _with_nodes(config, nodes)
    train = config.train
    if not config.cluster.node_range.elastic or train.micro_batch_size is not None or config.job.kind not in TRAINS:
        return sized
    most = parallel_dims_of(_with_nodes(config, usable_sizes(config)[-1])).micro_batch_size(train)
    share = parallel_dims_of(sized).micro_batch_size(train)
    micro = next(size for size in range(min(most, share), 0, -1) if share % size == 0)
    return dataclasses.replace(sized, train=dataclasses.replace(train, micro_batch_size=micro))


def at_most(config: Config) -> Config:
    """Return the config for the largest size that can be used."""
    return at_size(config, usable_sizes(config)[-1]) if config.cluster.node_range.elastic else config


def extreme_sizes(config: Config) -> Iterator[Config]:
    """Yield the config for the smallest size, whose ranks hold most of a sharded model, and for the largest."""
    sizes = usable_sizes(config)
    for nodes in dict.fromkeys((sizes[0], sizes[-1])):
        yield at_size(config, nodes)


def on_given_nodes(config: Config, given: int) -> Config:
    """Return the config for the number of nodes that the ranks have been started on.

    Raises:
        EnvironmentMismatchError: the config has a range, and this number cannot be used.
    """
    if not config.cluster.node_range.elastic:
        return config
    sizes = usable_sizes(config)
    if given not in sizes:
        raise EnvironmentMismatchError(
            f"ranks were started on {given} nodes, but cluster.nodes={config.cluster.nodes} can use "
            f"{', '.join(map(str, sizes))}",
            hint=f"start them with --nodes={nodes_to_use(sizes, given) or sizes[0]}",
        )
    return at_size(config, given)


def _with_nodes(config: Config, nodes: int) -> Config:
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=nodes))
