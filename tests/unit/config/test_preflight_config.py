"""The config group `preflight`, and the config of a job that only checks its nodes."""

from __future__ import annotations

from slurmtrain.choices import JobKind, PreflightMode, RequeueMode
from slurmtrain.config.compose import compose
from slurmtrain.config.evaluation import preflight_config
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.validate import validate


def test_the_job_of_the_verb_has_the_nodes_ranks_and_data_of_the_training_and_is_not_requeued() -> None:
    asked = compose(
        [
            *("cluster=a100x8", "cluster.nodes=4", "model=llama3_8b", "parallel=fsdp_tp_pp"),
            *("train.global_batch_size=64", "data=prepared", "data.path=/data/tokens", "requeue=chain"),
            *("preflight.exclude_slow=true", "preflight=full"),
        ]
    )
    validate(asked)
    made = preflight_config(asked, full=False)
    assert (made.world_size, made.cluster.nodes, made.data) == (32, 4, asked.data)
    assert (made.job.kind, made.requeue.mode) == (JobKind.PREFLIGHT, RequeueMode.OFF)
    assert (made.preflight.mode, made.preflight.exclude_slow) == (PreflightMode.QUICK, False)
    assert made.cluster.time_limit_min <= 15
    assert parallel_dims_of(made).world_size == 32
    assert preflight_config(asked, full=True).preflight.exclude_slow


def test_where_a_launcher_starts_the_ranks_the_job_of_the_verb_has_as_many() -> None:
    words = ["job=command", "job.command=python x.py", "job.launcher=torchrun", "cluster.tasks_per_node=1"]
    made = preflight_config(compose(["cluster=a100x8", "cluster.nodes=2", *words]), full=True)
    assert (made.cluster.tasks_per_node, made.world_size, made.job.command) == (8, 16, None)
