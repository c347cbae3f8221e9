"""Composing, freezing and validating a config."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurmtrain.choices import JobKind, PreflightMode, RequeueMode
from slurmtrain.config.compose import compose
from slurmtrain.config.evaluation import preflight_config
from slurmtrain.config.folders import config_groups
from slurmtrain.config.frozen import config_hash, freeze, load_frozen, to_config, to_values
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import ClusterConfig, Config, HooksConfig
from slurmtrain.errors import ConfigError, SlurmtrainError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
SECRET = "+cluster.env.WANDB_API_KEY='${oc.env:WANDB_API_KEY}'"


def frozen(config: Config, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(freeze(config))
    return path


# Freezing and reading back.


@pytest.mark.parametrize("cluster", config_groups()["cluster"])
@pytest.mark.parametrize("more", [[], ["experiment=smoke"], ["job=command", "job.command='echo \"a b\"'"]])
def test_a_frozen_config_reads_back_as_it_was(cluster: str, more: list[str], tmp_path: Path) -> None:
    config = compose([f"cluster={cluster}", "optim.betas=[0.8,0.99]", "+model.extra={a: [1, null]}", *more])
    assert load_frozen(frozen(config, tmp_path)) == config


@given(
    text=TEXT
    | st.sampled_from(
        ["${HOME}", r"\${HOME}", r"\\${a}", "${oc.env", "$", "\\", "\x85", "\u2028", "yes", "null", "1e3"]
    )
)
def test_any_text_survives_freezing(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = Config(cluster=ClusterConfig(setup=[text]), model={"a": {"b": [text]}})
    path = frozen(config, tmp_path_factory.mktemp("c"))
    assert to_values(load_frozen(path)) == to_values(config)


def test_a_frozen_config_of_another_version_of_the_package(tmp_path: Path) -> None:
    """A field that it lacks has its default; one that is not known here is an error."""
    path, text = tmp_path / "config.yaml", freeze(compose(["cluster=local", "train.log_every=7"]))
    with pytest.raises(ConfigError, match="is missing"):
        load_frozen(path)
    path.write_text("cluster: [torn")
    with pytest.raises(ConfigError, match="not a config of this version"):
        load_frozen(path)
    path.write_text(text.replace("  log_every: 7\n", ""))
    assert load_frozen(path) == compose(["cluster=local"])
    path.write_text(text.replace("  log_every: 7\n", "  clock: 1\n"))
    with pytest.raises(ConfigError, match="is not a config of this version: train has no field 'clock'") as error:
        load_frozen(path)
    assert "another version of slurmtrain" in str(error.value.hint)


def test_bash_variables_in_set_up_lines_reach_bash() -> None:
    config = compose([r"cluster.setup=['export A=\${HOME}/x','echo $B']"])
    assert config.cluster.setup == ["export A=${HOME}/x", "echo $B"]


def test_interpolations_are_resolved_in_the_frozen_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARED_DATA", "/shared/data")
    config = compose(["+data.more=['${oc.env:SHARED_DATA}/*.txt']", "data.seq_len='${train.steps}'"])
    assert config.data["more"] == ["/shared/data/*.txt"]
    assert config.data["seq_len"] == config.train.steps
    assert "${" not in freeze(config)


# Secrets.


def test_a_secret_is_frozen_by_name_and_there_for_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret ${x} \\")
    config = compose([SECRET])
    path = frozen(config, tmp_path)
    assert "s3cret" not in path.read_text() and "${oc.env:WANDB_API_KEY}" in path.read_text()
    assert load_frozen(path).cluster.env == {"WANDB_API_KEY": "s3cret ${x} \\"}
    assert load_frozen(path, with_secrets=False) == config


@pytest.mark.parametrize(
    ("override", "is_secret"),
    [
        ("+model.hub_token='${oc.env:SOMETHING}'", True),
        ("+model.list=['${oc.env:MY_SECRET}']", True),
        ("+model.copy='${cluster.env.API_KEY}'", True),
        ("+model.folder='${oc.env:SOMETHING}'", False),
    ],
)
def test_secrets_are_known_by_their_names_wherever_they_are(
    override: str, is_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOMETHING", "v4lue")
    monkeypatch.setenv("MY_SECRET", "v4lue")
    config = compose(["+cluster.env.API_KEY='${oc.env:MY_SECRET}'", override])
    assert ("v4lue" in freeze(config)) is not is_secret


def test_a_secret_that_the_job_did_not_inherit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x")
    path = frozen(compose([SECRET]), tmp_path)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match=r"cluster\.env\.WANDB_API_KEY .*variable WANDB_API_KEY is not set"):
        load_frozen(path)
    load_frozen(path, with_secrets=False)  # the supervisor and `resume` do not need it


def test_a_secret_outside_of_the_environment_would_be_written_into_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "x")
    for field, word in (
        (r"cluster\.srun_args\[0\]", "cluster.srun_args=['--x=${oc.env:MY_TOKEN}']"),
        (r"hooks\.on_finish", "hooks.on_finish='curl ${oc.env:MY_TOKEN}'"),
    ):
        with pytest.raises(ConfigError, match=f"{field} holds the secret"):
            validate(compose([word]))


# The identity of an experiment.


def test_the_hash_ignores_key_order_name_place_and_cluster() -> None:
    config = compose([])
    values = to_values(config)
    backwards = {key: dict(reversed(value.items())) for key, value in reversed(values.items())}
    elsewhere = compose(["cluster=a100x4", "job.name=other", "job.runs_dir=/elsewhere", "job.snapshot=none"])
    elsewhere = replace(elsewhere, secrets={"A": "env"}, hooks=HooksConfig(on_finish="date"))
    assert config_hash(to_config(backwards)) == config_hash(elsewhere) == config_hash(config)
    assert len(config_hash(config)) == 12


@pytest.mark.parametrize("override", ["train.seed=5", "optim.lr=0.1", "model.dim=8", "+data.x=1", "model=tiny"])
def test_the_hash_changes_with_what_decides_the_result(override: str) -> None:
    assert config_hash(compose([override])) != config_hash(compose([]))


# Validation.


@pytest.mark.parametrize("cluster", config_groups()["cluster"])
@pytest.mark.parametrize("experiment", [[], ["experiment=smoke"], ["experiment=laptop"]])
def test_everything_shipped_is_valid_as_it_is(cluster: str, experiment: list[str]) -> None:
    config = compose([f"cluster={cluster}", *experiment])
    assert validate(config).world_size == config.world_size


def working(ranks: int, micro: int | None, accumulation: int) -> Config:
    config = compose_once()
    train = replace(config.train, micro_batch_size=micro, global_batch_size=ranks * (micro or 1) * accumulation)
    return replace(config, train=train, cluster=ClusterConfig(nodes=ranks))


_composed: list[Config] = []


def compose_once() -> Config:
    if not _composed:
        _composed.append(compose(["cluster=a100x4"]))
    return copy.deepcopy(_composed[0])


@given(ranks=st.integers(1, 64), micro=st.none() | st.integers(1, 8), size=st.integers(1, 600))
def test_the_global_batches_that_a_refusal_names_are_accepted(ranks: int, micro: int | None, size: int) -> None:
    config = working(ranks, micro, 1)
    config.train.global_batch_size = size
    unit = ranks * (micro or 1)
    if size % unit == 0:
        validate(config)
        return
    with pytest.raises(ConfigError, match="does not divide by") as refusal:
        validate(config)
    for named in (refusal.value.hint or "").removeprefix("the nearest that do: ").split(" or "):
        config.train.global_batch_size = int(named)
        validate(config)
        assert abs(int(named) - size) < unit


VALUES = st.none() | st.booleans() | st.integers(-3, 3000) | st.floats() | TEXT | st.lists(st.integers(), max_size=2)


@given(
    group=st.sampled_from(["cluster", "job", "train", "optim", "checkpoint", "requeue", "parallel"]),
    index=st.integers(0, 50),
    value=VALUES,
)
def test_a_wild_value_is_accepted_or_refused_with_a_sentence_never_a_crash(
    group: str, index: int, value: object
) -> None:
    values = to_values(compose_once())
    names = list(values[group])
    values[group][names[index % len(names)]] = value
    said = ""
    try:
        validate(to_config(values))
    except SlurmtrainError as error:
        said = error.message
    assert not said or ("\n" not in said and any(f"{name}." in said for name in values))


def test_what_can_be_is_accepted() -> None:
    """What cannot be is in tests/unit/cli/test_bad_input.py."""
    for words in (
        ["cluster.setup=['a\nb']", "hooks.on_finish='a\nb'"],  # of several lines
        ["lora.r=4", "model.tie_embeddings=false", "lora.target_modules=[query,output]"],
        ["lora.r=4", "lora.target_modules=[query,blocks.1.feed_forward.down,attention.out]"],
        ["checkpoint.local=/dev/shm"],
        ["cluster=a100x4", "cluster.spare_nodes=1", "requeue=off", "requeue.in_place=true"],
    ):
        validate(compose(words))


# A job that only checks its nodes.


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


# A class that cannot be built.
