"""Lightning itself, on two ranks: one of them is told to stop, both leave after the same step, and go on bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slurmtrain
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.system.signals import StopCause, StopFlag
from tests.support.gloo import GlooRanks

SAMPLES = 44  # two ranks take 8 a step: an epoch has 6 steps, the last with fewer samples
EPOCHS = 3
STEPS = 18


def module(pytorch: Any) -> Any:
    """A LightningModule whose weights depend on the order of samples, the random state, schedules and buffers."""

    class Module(pytorch.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("error", self.net(batch[0]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    torch.manual_seed(1)
    return Module()


class Script:
    """A script with a Trainer, which can be started again and again in this process."""

    def __init__(self, world: DistributedContext):
        import lightning.pytorch

        self.pytorch: Any = lightning.pytorch
        from slurmtrain.integrations import lightning
        from slurmtrain.rank import api

        self.ours, self.world, self.session = lightning, world, api.session
        api.init(device="cpu")

    def trainer(self, *, stop_at: int | None = None, callback: Any = None, **arguments: Any) -> Any:
        """A new Trainer; the last rank alone is told to stop while it does step `stop_at`."""
        from slurmtrain.training.agreement import StopAgreement

        flag, rank, size = StopFlag(), self.world.environment.rank, self.world.environment.world_size
        self.session.agreement = StopAgreement(flag, self.session.initialised()[0].control_group)

        class Stop(self.pytorch.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step + 1 == stop_at and rank == size - 1:
                    flag.request(StopCause.SIGTERM)

        return self.pytorch.Trainer(
            **{"max_epochs": EPOCHS, "accelerator": "cpu", "devices": size, "logger": False, **arguments},
            callbacks=[Stop(), *([callback] if callback else [])],
            plugins=[self.ours.SlurmtrainEnvironment()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def fit(self, folder: Path, *, stop_at: int | None = None, **arguments: Any) -> Any:
        """What the script leaves with: an exit code, or the tensors of the module and the steps done."""
        callback = self.ours.SlurmtrainCallback(folder=folder, save_every=4)
        trainer = self.trainer(stop_at=stop_at, callback=callback, **arguments)
        samples = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0)))
        size, rank = self.world.environment.world_size, self.world.environment.rank
        sampler: Any = torch.utils.data.DistributedSampler(samples, size, rank)
        loader = slurmtrain.DataLoader(samples, batch_size=8 // size, sampler=sampler)
        model = module(self.pytorch)
        validated = torch.utils.data.DataLoader(samples, batch_size=22)
        try:
            trainer.fit(model, loader, validated, ckpt_path=self.ours.resume_from(folder))
        except SystemExit as ending:
            return ending.code
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}, trainer.global_step


def different(one: Any, other: Any) -> list[str]:
    """Names of the tensors that differ in the last bit, after as many steps."""
    steps = [] if one[1] == other[1] else [f"{one[1]} steps, and {other[1]}"]
    return steps + [name for name, tensor in one[0].items() if not torch.equal(tensor, other[0][name])]


class ByTheClock:
    """As much of a Trainer as tells whether this rank would validate now."""

    _val_check_time_interval = 1.0

    def __init__(self, due: bool):
        self.fit_loop = self.epoch_loop = self
        self._data_fetcher = None
        self._should_check_val_fx = lambda fetcher: due


def scripts(world: DistributedContext, folder: Path) -> dict[str, Any]:
    """What becomes of scripts that are stopped within an epoch, in its last step, and when they have finished."""
    script, found = Script(world), dict[str, Any]()
    undisturbed, stopped = script.fit(folder / "undisturbed"), folder / "stopped"
    found["steps"] = undisturbed[1]
    found["codes"] = [script.fit(stopped, stop_at=step) for step in (3, 12, 14)]
    found["different"] = different(undisturbed, script.fit(stopped))
    found["different when finished"] = different(undisturbed, script.fit(stopped))
    found["files"] = sorted(path.name for path in stopped.iterdir())
    world.leave_together()

    # An epoch is one step, of several batches or of one.
    found["epochs of one step"] = {}
    for name, shape in {"one batch": {"limit_train_batches": 1}, "accumulated": {"accumulate_grad_batches": 6}}.items():
        undisturbed = script.fit(folder / f"{name}, undisturbed", **shape)
        code = script.fit(folder / name, stop_at=2, **shape)
        found["epochs of one step"][name] = code, different(undisturbed, script.fit(folder / name, **shape))
    callback = script.ours.SlurmtrainCallback(folder=folder / "agreed")
    found["agreed"] = [callback._validation_is_due(ByTheClock(value)) for value in (world.environment.rank == 1, False)]
    world.leave_together()

    # A save that was killed.
    if world.environment.rank == 0:
        (stopped / ".step_000000099.ckpt.tmp-1").write_bytes(b"the beginning")
    world.leave_together()
    found["resumed from"] = Path(script.ours.resume_from(stopped)).name

    try:
        script.trainer(devices=3).fit(module(script.pytorch))
    except ConfigError as error:
        found["wrong devices"] = str(error)
    for name in ("async", "plain loader", "no sampler"):
        trainer = script.trainer(callback=script.ours.SlurmtrainCallback(folder=folder / name))
        if name == "async":
            trainer.strategy.checkpoint_io = script.ours.AsyncCheckpointIO()
        samples = torch.utils.data.TensorDataset(torch.ones(8, 4))
        loaders = slurmtrain if name == "no sampler" else torch.utils.data
        try:
            trainer.fit(module(script.pytorch), loaders.DataLoader(samples))
        except (ConfigError, UsageError) as error:
            found[name] = str(error)
    found["orders"] = _orders_of_loaders_made_anew(script, folder / "orders")
    return found


def _orders_of_loaders_made_anew(script: Script, folder: Path) -> list[list[float]]:
    """This rank's samples in two epochs, for each of which Trainer asks the module for a loader."""
    samples = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))
    sampler: Any = torch.utils.data.DistributedSampler(samples, 2, script.world.environment.rank)
    seen, model = list[list[float]](), module(script.pytorch)
    model.on_train_batch_start = lambda batch, index: seen.append(batch[0][:, 0].tolist())
    model.train_dataloader = lambda: slurmtrain.DataLoader(samples, batch_size=8, sampler=sampler)
    callback = script.ours.SlurmtrainCallback(folder=folder)
    script.trainer(callback=callback, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(model)
    return seen


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
    folder = tmp_path_factory.mktemp("lightning")
    with GlooRanks(folder) as ranks:
        return ranks(2, scripts, folder)


def test_a_lightning_script_stops_on_all_ranks_and_goes_on_bit_by_bit(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["steps"] == STEPS
        assert each["codes"] == [75, 75, 75]
        assert each["different"] == []
        assert each["different when finished"] == []
    assert found[0]["files"] == ["step_000000016.ckpt", "step_000000018.ckpt"]


def test_a_lightning_script_whose_epochs_are_one_step_stops_between_them(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["epochs of one step"] == {"one batch": (75, []), "accumulated": (75, [])}


def test_ranks_agree_on_a_validation_that_is_due_by_the_clock(found: list[dict[str, Any]]) -> None:
    assert [each["agreed"] for each in found] == [[True, False]] * 2


def test_a_save_that_was_killed_is_left_out(found: list[dict[str, Any]]) -> None:
    assert {each["resumed from"] for each in found} == {"step_000000018.ckpt"}


def test_trainer_is_told_which_ranks_there_are(found: list[dict[str, Any]]) -> None:
    assert (
        "Trainer has devices=3 and num_nodes=1, and the job has 2 ranks on each of 1 nodes" in found[0]["wrong devices"]
    )


def test_saves_of_which_nobody_knows_when_they_are_complete_and_loaders_without_a_place_are_refused(
    found: list[dict[str, Any]],
) -> None:
    assert all("AsyncCheckpointIO saves in the background" in each["async"] for each in found)
    assert all("cannot go on within an epoch of a DataLoader" in each["plain loader"] for each in found)
    assert all("pass sampler=DistributedSampler" in each["no sampler"] for each in found)


def test_loaders_that_are_made_anew_for_each_epoch_have_the_orders_of_their_epochs(found: list[dict[str, Any]]) -> None:
    (first, second), _ = each = [each["orders"] for each in found]
    assert first != second
    assert [sorted([*one, *other]) for one, other in zip(*each, strict=True)] == [[4.0 * row for row in range(16)]] * 2


def test_the_package_itself_imports_no_other_trainer() -> None:
    script = "import slurmtrain.rank.api, slurmtrain.rank.own_checkpointer, slurmtrain.training.trainer, sys; "
    script += "print({'lightning', 'pytorch_lightning', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()", done.stdout
