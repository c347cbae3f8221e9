"""Trainer and Accelerate themselves, on two ranks: one of them is told to stop, and both go on later, bit by bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurmtrain
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.system.signals import StopCause, StopFlag
from tests.support.gloo import GlooRanks

STEPS = 14
SAMPLES = 24  # two ranks take 4 a step: an epoch has 6 steps


def tensors_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and the optimiser's state, by name."""
    model = getattr(model, "module", model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for field, value in optimizer.state[parameter].items():
                found[f"{names[id(parameter)]}:{field}"] = torch.as_tensor(value).clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [(index + place * (1 + index % 5)) % 32 for place in range(8)]
        return {"input_ids": tokens, "labels": tokens}


class Attempts:
    """The attempts of a script, one after another in this process, which `leave` does not end but raises SystemExit."""

    def __init__(self, world: DistributedContext):
        from slurmtrain.rank import api

        def leave(code: int) -> None:
            raise SystemExit(code)

        vars(api)["leave"] = leave
        self.rank, self.session, self.flag = world.environment.rank, api.session, StopFlag()
        self.messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("slurmtrain").addHandler(handler)
        logging.getLogger("slurmtrain").setLevel("INFO")
        api.init(device="cpu")

    def begin(self) -> None:
        """What the attempt before was told counts no more."""
        from slurmtrain.training.agreement import StopAgreement

        self.flag = StopFlag()
        self.messages.clear()
        for checkpointer in list(self.session.checkpointers):
            checkpointer.close()
        self.session.agreement = StopAgreement(self.flag, self.session.initialised()[0].control_group)

    def stop_if(self, reached: bool) -> None:
        """Tell rank 1 alone to stop."""
        if reached and self.rank == 1:
            self.flag.request(StopCause.SIGTERM)

    def resumed(self) -> list[str]:
        return [message for message in self.messages if message.startswith("resuming")]

    def trainer(self, folder: Path, *, stop_at: int | None = None, **arguments: Any) -> Any:
        """A new Trainer, as a script makes it when it starts; rank 1 is told to stop in step `stop_at`."""
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

        from slurmtrain.integrations.transformers import SlurmtrainCallback

        self.begin()
        attempts = self

        class Stop(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                attempts.stop_if(state.global_step + 1 == stop_at)

        set_seed(1)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, attention_dropout=0.2, tie_word_embeddings=True, **shape))
        given: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "save_steps": 5,
            "logging_steps": 5,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        arguments = {**given, **arguments}
        callbacks = [Stop(), SlurmtrainCallback()]
        return Trainer(model, TrainingArguments(**arguments), train_dataset=Texts(), callbacks=callbacks)


def code_of(function: Callable[[], Any]) -> int | None:
    """The code with which the script leaves within `function`; None: it does not."""
    try:
        function()
    except SystemExit as ending:
        return int(ending.code or 0)
    return None


def trainers(world: DistributedContext, folder: Path) -> dict[str, Any]:
    """What becomes of a Trainer that is stopped at the end of an epoch and within one, and of whose newest checkpoint a file
    is cut short by a kill."""
    from slurmtrain.integrations.transformers import resume_from

    attempts = Attempts(world)
    trainer = attempts.trainer(folder / "undisturbed", save_strategy="no")
    trainer.train()
    undisturbed = tensors_of(trainer.model, trainer.optimizer)

    stopped = folder / "stopped"
    found: dict[str, Any] = {"codes": []}
    for step in (6, 9):
        trainer = attempts.trainer(stopped, stop_at=step)
        resume = resume_from(stopped)
        found["codes"].append(code_of(lambda t=trainer, r=resume: t.train(resume_from_checkpoint=r)))  # type: ignore[misc]
    found["saved"] = sorted(path.name for path in stopped.glob("checkpoint-*"))
    if world.environment.rank == 0:
        file = stopped / "checkpoint-9/optimizer.pt"
        file.write_bytes(file.read_bytes()[:-100])
    world.leave_together()
    trainer = attempts.trainer(stopped)
    resume = resume_from(stopped)
    found["resumed"] = Path(str(resume)).name, sorted(path.name for path in stopped.glob(".incomplete-*"))
    trainer.train(resume_from_checkpoint=resume)
    found["same"] = same(undisturbed, tensors_of(trainer.model, trainer.optimizer))
    found["logged"] = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("trainers")
    with GlooRanks(folder) as ranks:
        return ranks(2, trainers, folder)


def test_a_trainer_stops_on_all_ranks_and_goes_on_bit_by_bit_from_the_newest_whole_checkpoint(
    trained: list[dict[str, Any]],
) -> None:
    for found in trained:
        assert found["codes"] == [75, 75]
        assert found["saved"] == ["checkpoint-5", "checkpoint-6", "checkpoint-9"]
        assert found["resumed"] == ("checkpoint-6", [".incomplete-checkpoint-9-attempt-0"])
        assert found["same"]
        assert found["logged"] == [5, 10]


def accelerated(world: DistributedContext, folder: Path) -> dict[str, Any]:
    """What becomes of the loop of `docs/clients.md` with Accelerate: 18 steps, 6 an epoch."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    attempts = Attempts(world)

    def train(name: str, *, stop_at: int | None = None) -> dict[str, torch.Tensor]:
        attempts.begin()
        set_seed(1)
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, SAMPLES * 4).reshape(SAMPLES, 4))
        sampler: Any = torch.utils.data.DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
        loader = slurmtrain.DataLoader(data, batch_size=2, sampler=sampler)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        state = {"model": model, "optimizer": optimizer.optimizer, "scheduler": scheduler, "loader": loader}
        checkpointer = slurmtrain.Checkpointer(folder / name)
        checkpointer.restore(**state)
        for _ in range(loader.epoch, 3):
            for (batch,) in loader:
                attempts.stop_if(loader.step == stop_at)
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                checkpointer.after_step(loader.step, **state)
        return {**tensors_of(model, optimizer), "rate": torch.tensor(scheduler.get_last_lr())}

    undisturbed = train("undisturbed")
    codes = [code_of(lambda stop=step: train("stopped", stop_at=stop)) for step in (6, 9)]  # type: ignore[misc]
    return {"codes": codes, "same": same(undisturbed, train("stopped")), "resumed": attempts.resumed()}


def test_a_loop_with_accelerate_stops_on_all_ranks_and_goes_on_bit_by_bit(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    each = gloo_ranks(2, accelerated, tmp_path)
    assert [(found["codes"], found["same"]) for found in each] == [([75, 75], True)] * 2
    assert each[0]["resumed"] == ["resuming at step 9 from checkpoint_0000009, the newest complete checkpoint"]
