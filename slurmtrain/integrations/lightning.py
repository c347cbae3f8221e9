"""Lightning's Trainer under slurmtrain: a callback that stops, saves and resumes, and an environment that knows the ranks.

from slurmtrain.integrations.lightning import SlurmtrainCallback, SlurmtrainEnvironment, resume_from

trainer = Trainer(..., callbacks=[SlurmtrainCallback()], plugins=[SlurmtrainEnvironment()])
trainer.fit(model, loader, ckpt_path=resume_from())
"""

from __future__ import annotations

import atexit
import logging
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.state import RandomState
from slurmtrain.errors import EXIT_REQUEUE, ConfigError
from slurmtrain.integrations.commit import gather_states, save_together
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.parallel.ddp import warm_up_ddp_buckets
from slurmtrain.runtime.api import init, session, should_stop
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.signals import STOP_SIGNALS

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
NOT_SHOWN = {"step", "step_time_s"}  # in metrics.jsonl, which has its own
SHOWN_AS = {"train_loss": "loss", "val_loss": "valid_loss"}  # usual names of a module's log, and those of metrics.jsonl
OWN = "step_*.ckpt"  # what SlurmtrainCallback writes


def _joined() -> DistributedContext:
    """Return this rank's groups; call `slurmtrain.init` if the script has not."""
    if session.distributed is None:
        init()
    return session.initialised()[0]


class SlurmtrainEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """The ranks as slurmtrain has found them: Lightning starts no processes, and neither requeues nor catches signals.

    Raises:
        ConfigError: of `fit`, when Trainer's devices and num_nodes are not the ranks that there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._environment = _joined().environment

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # not used: the process group exists already

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return Environment.detect().source != "single"

    def world_size(self) -> int:
        return self._environment.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number of ranks is given."""

    def global_rank(self) -> int:
        return self._environment.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is given."""

    def local_rank(self) -> int:
        return self._environment.local_rank

    def node_rank(self) -> int:
        return self._environment.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check that Trainer was given the ranks that there are.

        Raises:
            ConfigError: it was not.
        """
        nodes, each = len(self._environment.nodes), self._environment.local_world_size
        if (num_devices, num_nodes) != (each, nodes):
            raise ConfigError(
                f"Trainer has devices={num_devices} and num_nodes={num_nodes}, and the job has {each} ranks on each of "
                f"{nodes} nodes",
                hint=f"Trainer(devices={each}, num_nodes={nodes}), or change cluster.tasks_per_node and cluster.nodes",
            )


class SlurmtrainCallback(Callback):  # type: ignore[misc]
    """Stops all ranks after the same step when the job has to leave, saves, and ends with exit code 75: start me again.

    It saves through `Trainer.save_checkpoint`, in whatever form the strategy has; pass `resume_from()` to `fit`. It also
    reports the steps, and lets a resumed run go on with the next batch: Lightning by itself begins the epoch's batches
    again, and has no random state in its checkpoints. Use one for one call of `fit`.

    Args:
        save_every: also save after every so many steps (`Trainer.global_step`); 0: only when the job has to leave, and
            at the end.
        folder: where checkpoints go; None: `lightning` in the run directory, or ./lightning.
        keep: how many checkpoints stay.
    """

    def __init__(self, *, save_every: int = 0, folder: Path | str | None = None, keep: int = 2):
        self._distributed = _joined()
        self._save_every, self._keep = save_every, keep
        self._folder = own_folder() if folder is None else Path(folder)
        self._report: ProgressReport | None = None
        self._logged = 0.0  # when, by the monotonic clock
        self._values: dict[str, float] = {}  # that were logged
        self._position = _Position()
        self._of_all_ranks: list[dict[str, Any]] | None = None  # positions, while Trainer writes a checkpoint for us
        self._resumed = False  # `_position` is that of a checkpoint
        self._saved: int | None = None
        self._first_step = 0
        self._waited = False  # for a validation
        self._begun = False
        self._handlers: dict[int, Any] = {}

    # In the order in which Trainer calls them.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and self._begun:
            raise ConfigError(
                "SlurmtrainCallback was used by an earlier fit() already, whose checkpoints would be mixed up with these",
                hint="create a Trainer with a new callback for each fit(), with another folder",
            )
        self._begun = self._begun or stage == "fit"
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        _leave_groups_at_exit()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        of_all_ranks = state_dict.get("ranks", [])
        if of_all_ranks:
            rank = self._distributed.environment.rank
            same = len(of_all_ranks) == self._distributed.environment.world_size
            self._position.load_state_dict(of_all_ranks[rank] if same else {"batches": of_all_ranks[0]["batches"]})
            self._resumed = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            raise ConfigError(
                "AsyncCheckpointIO saves in the background, and does not report when a checkpoint is complete",
                hint="leave it out",
            )

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_signals_back()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_signals_back()
        warm_up_ddp_buckets(trainer.strategy.model)
        self._position.go_there(trainer, resumed=self._resumed)
        self._first_step = trainer.global_step
        self._report = ProgressReport(trainer.global_step, _total_steps(trainer))
        if self._resumed and self._distributed.environment.rank == 0:
            log.info(
                "resuming at step %d: epoch %d, batch %d",
                *(trainer.global_step, trainer.current_epoch, self._position.batches),
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._position.note_order(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._position.batch_done(0 if trainer.is_last_batch else batch_idx + 1)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # gradients that no step has used yet would be lost
        # From a checkpoint between a batch and its validation, or at the end of an epoch, Lightning goes on with a wrong
        # count of batches or epochs. The next batch will do, unless each is validated.
        if trainer.is_last_batch:
            return
        due = self._validation_is_due(trainer)
        if not due or self._waited:
            self._after_step(trainer)
        self._waited = due

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_training_batches <= trainer.accumulate_grad_batches:  # one step: there is no other place
            self._after_step(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)
        self._save(trainer)
        if self._report is not None:
            self._report.close()

    def _after_step(self, trainer: Any) -> None:
        """Stop if a rank was told to, or save if it is time."""
        step = trainer.global_step
        if time.monotonic() >= self._logged + LOG_EVERY_S:
            self._log(trainer)
        if should_stop():
            self._save(trainer)
            self._leave(step)
        if self._save_every and step // self._save_every > (self._saved or self._first_step) // self._save_every:
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._of_all_ranks is None else {"ranks": self._of_all_ranks}

    def _log(self, trainer: Any) -> None:
        """Report the step, and what the module has logged; Lightning keeps a validation's values until the next one."""
        self._logged = time.monotonic()
        if self._report is not None:
            logged = trainer.callback_metrics.items()
            values = {SHOWN_AS.get(name, name): float(value) for name, value in logged if name not in NOT_SHOWN}
            changed = {name: value for name, value in values.items() if self._values.get(name) != value}
            self._values = values
            self._report.log(trainer.global_step, **changed)

    def _save(self, trainer: Any) -> None:
        """Save the state after `trainer.global_step` steps, unless that is done."""
        step = trainer.global_step
        if step == self._saved:
            return
        self._position.note()
        final = self._folder / f"step_{step:09d}.ckpt"
        self._of_all_ranks = gather_states(self._distributed, self._position.state_dict())
        try:
            save_together(self._distributed, final, trainer.save_checkpoint, pattern=OWN, keep=self._keep)
        finally:
            self._of_all_ranks = None
        if self._report is not None:
            self._report.saved(step, final)
        self._saved = step

    def _leave(self, step: int) -> NoReturn:
        """Leave by Lightning's own way out of a SIGTERM, so that loggers and callbacks come to their end."""
        self._distributed.leave_together()
        log.info("told to stop: exiting after step %d", step)
        raise SIGTERMException(EXIT_REQUEUE)

    def _validation_is_due(self, trainer: Any) -> bool:
        """Return whether Trainer validates after this batch, on any rank: clocks differ (val_check_interval in time)."""
        due = bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            due = bool(RankGroup(self._distributed.control_group).maximum(int(due)))
        return due

    def _take_signals_back(self) -> None:
        """Let Lightning's own handling of signals stand back, which begins a broadcast wherever a rank happens to be."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _total_steps(trainer: Any) -> int | None:
    """Return the step at which training ends; None: it is not known."""
    with suppress(MisconfigurationException):  # accumulation changes on the way
        total = trainer.estimated_stepping_batches
        return int(total) if 0 < total < float("inf") else None
    return None


class _Position:
    """Where this rank is in its epoch: batches done, and the random state now and when the epoch's order was drawn."""

    def __init__(self) -> None:
        self.batches = 0
        self._now: dict[str, Any] | None = None
        self._order: dict[str, Any] | None = None
        self._begun = False  # the epoch that begins next has drawn its order

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "now": self._now, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self._now, self._order = state["batches"], state.get("now"), state.get("order")

    def note(self) -> None:
        """Note the random state as it is."""
        self._now = RandomState().state_dict()

    def batch_done(self, batches: int) -> None:
        """Note that so many batches of the epoch are done; 0: it is at its end."""
        self.batches, self._begun = batches, False

    def note_order(self, trainer: Any) -> None:
        """Note the random state from which the order of the epoch's batches is drawn next, unless it was drawn already."""
        if self._begun:
            return
        generators = [generator.get_state() for generator in _generators(trainer)]
        self._order = {"random": RandomState().state_dict(), "generators": generators}

    def go_there(self, trainer: Any, *, resumed: bool) -> None:
        """Begin the epoch's batches; of a resumed run after those that were done, in the same order.

        A loader that saves its own position is left to Lightning.
        """
        fetcher, loaders = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader.flattened
        keeps_position = any(hasattr(loader, "load_state_dict") for loader in loaders)
        if resumed:  # Lightning would say that it begins the epoch's batches again, which it does not here
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        if resumed and self.batches and self._order is not None:
            RandomState().load_state_dict(self._order["random"])
            for generator, state in zip(_generators(trainer), self._order["generators"], strict=False):
                generator.set_state(state)
        elif resumed and self._now is not None:
            RandomState().load_state_dict(self._now)
        if not keeps_position and (resumed or fetcher.length is not None):  # otherwise a batch was fetched already
            if not (resumed and self.batches):
                self.note_order(trainer)
            for loader in loaders:
                _set_epoch(loader, trainer.current_epoch)
            _begin_batches(fetcher, loaders, self.batches if resumed else 0)
            self._begun = True
        if resumed and self.batches and self._now is not None:
            RandomState().load_state_dict(self._now)


class _Later:
    """A sampler whose first round begins after `skip` entries. Only one round of it is under way at a time."""

    def __init__(self, sampler: Any, skip: int):
        self._sampler, self._skip = sampler, skip
        self._entries: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._entries = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._entries)

    def skip(self) -> None:
        """Skip the entries now, if that was not done: it draws the order, if it is random."""
        left, self._skip = self._skip, 0
        for _ in range(left):
            next(self._entries, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _begin_batches(fetcher: Any, loaders: list[Any], skip: int) -> None:
    """Begin the batches of an epoch anew, after the first `skip`.

    Of one map-style loader they are not even read; of others they are read, and thrown away.
    """
    loader = loaders[0]
    if (
        skip
        and len(loaders) == 1
        and isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
    ):
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        # Past DataLoader.__setattr__, which refuses it because an iterator that exists would not see it.
        later = _Later(getattr(loader, name), skip)
        object.__setattr__(loader, name, later)
        # With persistent workers, one iterator serves all epochs, with the sampler that it began with.
        if loader._iterator is not None:
            loader._iterator._index_sampler = later
        iter(fetcher)
        later.skip()
        return
    iter(fetcher)
    for _ in range(skip):
        next(fetcher)
    fetcher.fetched -= skip  # Trainer adds them


def _set_epoch(loader: Any, epoch: int) -> None:
    for sampler in _samplers(loader):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def _generators(trainer: Any) -> list[torch.Generator]:
    """Return the generators that the loaders were given, each once."""
    found: list[torch.Generator] = []
    for loader in trainer.fit_loop._combined_loader.flattened:
        for owner in (loader, *_samplers(loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
                found.append(generator)
    return found


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in found if sampler is not None]


def _leave_groups_at_exit() -> None:
    """End torch's process group while the interpreter still works, as Lightning would if it had made it."""

    def end() -> None:
        with suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()

    atexit.register(end)


def own_folder() -> Path:
    """Return where SlurmtrainCallback saves: `lightning` in the run directory, or here."""
    _joined()
    return session.context.run_dir.path / "lightning" if session.context is not None else Path("lightning")


def resume_from(folder: Path | str | None = None) -> str | None:
    """Return the newest checkpoint, for `fit(..., ckpt_path=resume_from())`. All ranks call it together, and get the same.

    Args:
        folder: that of SlurmtrainCallback, if it was given another one.

    Returns:
        None: there is no checkpoint, so that this is a fresh start.
    """
    distributed, newest = _joined(), ""
    if distributed.environment.rank == 0:
        newest = max(map(str, (own_folder() if folder is None else Path(folder)).glob(OWN)), default="")
    return distributed.broadcast_text(newest) or None
