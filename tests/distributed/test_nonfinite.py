"""Numbers that break: updates that are left out, training that goes back by itself, and runs that end with a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.errors import EXIT_CONFIG, DivergedError
from slurmtrain.models import Decoder
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import StepResult, TrainingState
from tests.distributed.test_training import StopAt, alone, fit, losses, trainer
from tests.support.gloo import GlooRanks
from tests.support.local_runs import Project, assert_same_tensors
from tests.support.reading import checkpoint_tensors

POISON = 200  # the first token of a sample that breaks the model
LENGTH = 64


class Samples:
    """Sequences of random tokens below 128; `poisoned` ones begin with POISON."""

    def __init__(self, poisoned: Sequence[int], length: int = 4096):
        self._poisoned, self._length = set(poisoned), length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(128, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        if index in self._poisoned:
            tokens[0] = POISON
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


class PoisonedData:
    """As a `data._target_`."""

    def __init__(self, poisoned: Sequence[int] = (), **ignored: Any):
        self.train, self.valid = Samples(poisoned), Samples([], length=8)


class Fragile(Decoder):
    """As a `model._target_`: what a poisoned sample makes of its logits depends on `value`."""

    def __init__(self, value: str = "nan", **settings: Any):
        super().__init__(**settings)
        self.value = float(value)

    def forward(self, tokens_BS: Tensor, *more: Any, **named: Any) -> Tensor:
        result = super().forward(tokens_BS, *more, **named)
        if self.training and not tokens_BS.is_floating_point():  # a stage that is not the first has no tokens
            result = result + torch.where((tokens_BS[:, 0] == POISON).any(), self.value, 0.0)
        return result


# In the data's own order, step n has samples 8 (n - 1) to 8 n - 1; with two ranks, rank 1 has the later four.
BASE = [
    f"data._target_={__name__}.PoisonedData",
    "train.shuffle=false",
    "train.eval_every=0",
    "checkpoint.every_steps=4",
    "model.dropout=0.1",
    "train.steps=16",
]


def poisoned(*steps: int, **more: Any) -> list[str]:
    """Overrides: the last sample of each of these steps is poisoned."""
    samples = ",".join(str(8 * step - 1) for step in steps)
    words = [f"+model.{name}={value}" for name, value in more.items()]
    return [*BASE, f"model._target_={__name__}.Fragile", f"+data.poisoned=[{samples}]", *words]


class WithoutUpdate(TrainingHook):
    """Leaves out the optimiser's work in a step, by other means than the trainer's."""

    def __init__(self, step: int):
        self._step = step

    def before_optimizer_step(self, state: TrainingState, grad_norm: Tensor) -> None:
        if state.step + 1 == self._step:
            state.optimizer.step = lambda: None  # type: ignore[assignment, method-assign]

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        state.optimizer.__dict__.pop("step", None)


def saved(run_path: Path) -> list[int]:
    return [step_of(path) for path in committed(run_path / "checkpoints")]


def events(run_path: Path, event: Event) -> list[dict[str, Any]]:
    return [each for each in RunDir(run_path).events() if each["event"] == event]


def assert_same_run(one: Path, other: Path, *, but: Sequence[int] = ()) -> None:
    """The same steps with the same losses, besides those of some steps, and the same last checkpoint to the last bit."""
    logs = [losses(path) for path in (one, other)]
    assert logs[0].keys() == logs[1].keys()
    assert [step for step in logs[0] if step not in but and logs[0][step] != logs[1][step]] == []
    assert_same_tensors(checkpoint_tensors(one / "checkpoints"), checkpoint_tensors(other / "checkpoints"))
    hashes = [losses(path, "data_hash") for path in (one, other)]
    assert hashes[0] == hashes[1]


LAYOUTS = {
    "one rank": (1, []),
    "DDP": (2, []),
    "FSDP": (2, ["parallel.dp_shard=2"]),
    "TP": (2, ["parallel.tp=2", "model.dropout=0"]),
    "pipeline": (2, ["parallel.pp=2", "train.micro_batch_size=4", "model.dropout=0"]),
}


def fit_both(distributed: DistributedContext, folder: Path, bad: list[str], good: list[str]) -> None:
    fit(distributed, folder / "bad", bad)
    fit(distributed, folder / "good", good)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name == "TP" else ()) for name in LAYOUTS]
)
def test_after_a_skipped_update_all_bits_are_those_of_a_run_without_it(
    gloo_ranks: GlooRanks, tmp_path: Path, layout: str
) -> None:
    ranks, words = LAYOUTS[layout]
    words = [*words, "train.steps=9"]
    # As `poisoned`, with a model that does not mind, and no update in this step.
    without_update = [f"+data.poisoned=[{8 * 6 - 1}]", f"train.hooks=[{{_target_: {__name__}.WithoutUpdate, step: 6}}]"]
    bad, good = [*poisoned(6), *words], [*BASE, *without_update, *words]
    if ranks == 1:
        fit_both(alone(), tmp_path, bad, good)
    else:
        size = f"cluster.tasks_per_node={ranks}"
        gloo_ranks(ranks, fit_both, tmp_path, [*bad, size], [*good, size], timeout_s=360)
    assert math.isnan(losses(tmp_path / "bad")[6]) and math.isfinite(losses(tmp_path / "good")[6])
    assert_same_run(tmp_path / "bad", tmp_path / "good", but=[6])
    (told,) = events(tmp_path / "bad", Event.UPDATE_SKIPPED)
    alone_or_last = None if layout == "TP" else ranks - 1  # with TP both have the loss
    assert (told["step"], told["samples"], told["rank"], told["skipped"]) == (6, [40, 48], alone_or_last, 1)


@pytest.mark.parametrize("value", ["-inf", "1e38"])
def test_a_loss_that_is_infinite_is_skipped_like_one_that_is_no_number(tmp_path: Path, value: str) -> None:
    """+inf makes NaN of the softmax; the others may leave gradients finite."""
    fit(alone(), tmp_path / "run", poisoned(6, value=value))
    assert len(events(tmp_path / "run", Event.UPDATE_SKIPPED)) == (value != "1e38")
    saved = checkpoint_tensors(tmp_path / "run" / "checkpoints").values()
    assert all(tensor.isfinite().all() for tensor in saved if tensor.is_floating_point())


def state(run_path: Path) -> str:
    """What the newest checkpoint says of everything that is no tensor: what the trainer remembers, too."""
    return json.dumps(read_manifest(committed(run_path / "checkpoints")[-1]).state, sort_keys=True)


TROUBLE = (7, 8, 9)  # with max_skipped=3: noticed for the third time in step 11
ROLLBACK = ["train.max_skipped=3"]


@pytest.fixture(scope="module")
def went_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has gone back past its trouble."""
    run = tmp_path_factory.mktemp("rollback") / "run"
    outcome = fit(alone(), run, [*poisoned(*TROUBLE), *ROLLBACK])
    assert outcome.finished and outcome.step == 16
    return run


def test_too_many_skips_in_a_row_go_back_past_the_batches_that_broke_it(went_back: Path) -> None:
    (back,) = events(went_back, Event.ROLLED_BACK)
    assert (back["step"], back["from_step"]) == (4, 11)
    (again,) = events(went_back, Event.CAUGHT_UP)
    assert again["step"] == 11 and again["time"] > back["time"]
    newest = read_manifest(committed(went_back / "checkpoints")[-1])
    assert newest.state["loader"]["samples_consumed"] == 8 * (16 + 11 - 4)  # steps 5 to 11 were left out
    assert list(losses(went_back)) == list(range(1, 17))  # each step once
    assert all(map(math.isfinite, losses(went_back).values()))
    assert newest.state["trainer"]["health"]["skipped"] == 3


class BeginWith(TrainingHook):
    """Moves the position in the data before the first step."""

    def __init__(self, sample: int):
        self._sample = sample

    def start(self, state: TrainingState) -> None:
        state.loader.load_state_dict({"samples_consumed": self._sample})


def test_what_follows_a_rollback_is_a_run_that_has_never_seen_those_samples(went_back: Path, tmp_path: Path) -> None:
    """Against a run that stops at that checkpoint, and goes on from there with the samples after the trouble."""
    words = poisoned()
    assert fit(alone(), tmp_path / "other", words, StopAt(4)).step == 4
    trainer(alone(), tmp_path / "other", words, attempt=2, hooks=[BeginWith(11 * 8)]).fit()
    assert_same_run(went_back, tmp_path / "other")


@pytest.mark.parametrize("stop_after", [11, 12])
def test_a_stop_around_a_rollback_changes_no_bit(went_back: Path, tmp_path: Path, stop_after: int) -> None:
    """Asked once at the start and once a step, so the 12th is after the rollback, in its first step."""
    words = [*poisoned(*TROUBLE), *ROLLBACK]
    assert fit(alone(), tmp_path / "stopped", words, StopAt(stop_after)).step == (5 if stop_after == 12 else stop_after)
    fit(alone(), tmp_path / "stopped", words, attempt=2)
    assert_same_run(went_back, tmp_path / "stopped")
    assert state(went_back) == state(tmp_path / "stopped")


@pytest.mark.parametrize(
    ("ranks", "bad", "words", "back_to", "back_from"),
    [
        pytest.param(1, [16], ["train.on_nonfinite=rollback"], 12, 16, id="in the last step"),
        pytest.param(2, TROUBLE, [*ROLLBACK, "parallel.dp_shard=2"], 4, 11, id="all ranks together"),
    ],
)
def test_training_goes_back_to_the_checkpoint_from_before(
    gloo_ranks: GlooRanks, tmp_path: Path, ranks: int, bad: list[int], words: list[str], back_to: int, back_from: int
) -> None:
    words = [*poisoned(*bad), *words, f"cluster.tasks_per_node={ranks}"]
    outcomes = gloo_ranks(ranks, fit, tmp_path / "run", words)
    assert [(each.finished, each.step) for each in outcomes] == [(True, 16)] * ranks
    (back,) = events(tmp_path / "run", Event.ROLLED_BACK)
    assert (back["step"], back["from_step"]) == (back_to, back_from)


def test_stop_ends_with_a_sentence_that_names_step_rank_and_samples(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    words = [*poisoned(10), "train.on_nonfinite=stop", "cluster.tasks_per_node=2"]
    endings = gloo_ranks.start_joined(2, fit, tmp_path / "run", words).endings()
    for ending in endings:
        for what in (
            "step 10 has loss nan and gradient norm nan",
            "by the loss of rank 1",
            "its samples are 72 to 79 of the run's order (in the data set: 72, 73,",
            "train.on_nonfinite=stop",
        ):
            assert what in str(ending.error)
    assert saved(tmp_path / "run") == [4, 8]  # and of the 12th step, in which it is noticed, none


def test_after_some_rollbacks_that_do_not_help_the_run_ends_and_keeps_what_was_sound(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        fit(alone(), tmp_path / "run", [*poisoned(*range(10, 40)), "train.max_skipped=2", "train.max_rollbacks=3"])
    assert caught.value.exit_code == EXIT_CONFIG
    for words in ("for 2 steps in a row", "train.max_skipped=2", "going back 3 times in a row has not helped"):
        assert words in caught.value.message
    assert saved(tmp_path / "run") == [8]  # that of step 12 had taken the place of step 4's


def test_a_run_whose_first_steps_break_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="there is no checkpoint from before"):
        fit(alone(), tmp_path / "run", [*poisoned(3, 4, 5), *ROLLBACK])


def test_checkpoints_of_skipped_steps_never_push_out_the_last_one_from_before(tmp_path: Path) -> None:
    """Three steps in a row save each; the newest two would be of the trouble."""
    words = [*poisoned(*range(6, 13)), "train.max_skipped=0", "checkpoint.every_steps=1", "train.steps=12"]
    fit(alone(), tmp_path / "run", words)
    assert saved(tmp_path / "run") == [4, 11, 12]  # step 5 gave finite numbers, so step 4 was sound


def test_the_command_line_says_so_and_does_not_try_it_again(project: Project) -> None:
    (project.path / "mine.py").write_text(
        "from slurmtrain.models import Decoder\n"
        "class Mine(Decoder):\n"
        "    def forward(self, tokens):\n"
        "        return super().forward(tokens) * float('nan')\n"
    )
    run = project.submit("model._target_=mine.Mine", "train.max_skipped=2", "~model.dropout")
    assert run.wait() == EXIT_CONFIG
    (attempt,) = run.attempts()
    assert (attempt.reason, attempt.fault) == ("diverged", None)
    assert (attempt.first_step, attempt.last_step) == (0, 4)  # two more, since a step is looked at two steps later
    assert not committed(run.run_dir.checkpoints)
    status = " ".join(project.cli("status", "last").stdout.split())
    assert "not finite for 2 steps in a row" in status and "finished" not in status
    assert (
        f"`resume {run.run_dir.id} optim.lr=...` goes on with other values, from the newest checkpoint if there is one"
        in status
    )
