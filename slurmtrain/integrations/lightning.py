"""Lightning's Trainer under slurmtrain: a callback that stops, saves and resumes, and an environment that knows the ranks.

from slurmtrain.integrations.lightning import SlurmtrainCallback, SlurmtrainEnvironment, resume_from

trainer = Trainer(..., callbacks=[SlurmtrainCallback()], plugins=[SlurmtrainEnvironment()])
trainer.fit(model, loader, ckpt_path=resume_from())
"""

from __future__ import annotations

import atexit
import base64
import io
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.state import RandomState
from slurmtrain.data.exact_loader import DataLoader
from slurmtrain.errors import EXIT_REQUEUE, ConfigError
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.parallel.ddp import warm_up_ddp_buckets
from slurmtrain.rank.api import init, session, should_stop
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import fsync_directory
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
    reports the steps, and saves the random state, which Lightning does not. Batches to train on come from a
    `slurmtrain.DataLoader`, or another loader that saves its place. Use one for one call of `fit`.

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
        self._batches = 0  # of this epoch that are done
        self._random: dict[str, Any] | None = None  # this rank's random state in the checkpoint
        self._of_all_ranks: list[dict[str, Any]] | None = (
            None  # random states, while Trainer writes a checkpoint for us
        )
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
        of_all_ranks, environment = state_dict.get("ranks", []), self._distributed.environment
        self._batches = state_dict.get("batches", 0)
        if len(of_all_ranks) == environment.world_size:
            self._random = of_all_ranks[environment.rank]

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
        self._go_there(trainer)
        self._first_step = trainer.global_step
        self._report = ProgressReport(trainer.global_step, _total_steps(trainer))
        if trainer.global_step and self._distributed.environment.rank == 0:
            log.info(
                "resuming at step %d: epoch %d, batch %d", trainer.global_step, trainer.current_epoch, self._batches
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for loader in trainer.fit_loop._combined_loader.flattened:
            if (
                isinstance(loader, DataLoader) and loader.epoch < trainer.current_epoch
            ):  # reload_dataloaders_every_n_epochs
                loader.load_state_dict({**loader.state_dict(), "epoch": trainer.current_epoch, "batch": 0})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches = 0 if trainer.is_last_batch else batch_idx + 1
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
        return {} if self._of_all_ranks is None else {"ranks": self._of_all_ranks, "batches": self._batches}

    def _go_there(self, trainer: Any) -> None:
        """Let the loaders go on after the batches of this epoch that are done, with the random state of then.

        Lightning itself counts batches and epochs, but restores no random state, and no loader's place at an epoch's end.
        """
        for loader in trainer.fit_loop._combined_loader.flattened:
            if isinstance(loader, DataLoader):
                loader.load_state_dict({**loader.state_dict(), "epoch": trainer.current_epoch, "batch": self._batches})
            elif not hasattr(loader, "load_state_dict"):
                raise ConfigError(
                    f"SlurmtrainCallback cannot go on within an epoch of a {type(loader).__name__}, which has no state_dict",
                    hint="slurmtrain.DataLoader(...) has the arguments of torch's; on several ranks, "
                    "sampler=DistributedSampler(dataset, trainer.world_size, trainer.global_rank)",
                )
        if self._random is not None:
            RandomState().load_state_dict(self._random)

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
        final = self._folder / f"step_{step:09d}.ckpt"
        self._of_all_ranks = _gathered(self._distributed, RandomState().state_dict())
        try:
            _save_together(self._distributed, final, trainer.save_checkpoint, keep=self._keep)
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
            due = any(RankGroup(self._distributed.control_group).sums([due]))
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


# A checkpoint gets its final name when it is complete and on the disk, in one rename.

TEMPORARY = ".tmp-"  # in the names of what is being written


def _save_together(distributed: DistributedContext, final: Path, write: Callable[[Path], object], *, keep: int) -> None:
    """Save a file or folder under a hidden name, and give it the name `final` when all of it is on the disk.

    All ranks call it together. One of that name that is there already is from an earlier attempt, and complete: it stays.

    Args:
        write: writes this rank's part to a path.
        keep: how many checkpoints stay, the last ones by name.
    """
    attempt = session.context.number if session.context is not None else 0
    temporary, first = final.with_name(f".{final.name}{TEMPORARY}{attempt}"), distributed.environment.rank == 0
    if first:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
    distributed.leave_together()  # the folder is there, and empty
    write(temporary)
    distributed.leave_together()  # all have written
    if distributed.environment.local_rank == 0:  # the memory of a node may hold back what was written there
        for path in _files(temporary):
            with suppress(FileNotFoundError):  # of another node, and not to be seen here yet
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    distributed.leave_together()  # all is on the disk
    if first:
        if final.exists():
            _remove(temporary)
        else:
            temporary.rename(final)
            fsync_directory(final.parent)
        for path in final.parent.glob(f".{OWN}{TEMPORARY}*"):
            number = path.name.rpartition("-")[2]
            if not number.isdigit() or int(number) <= attempt:  # a later attempt may be writing already
                _remove(path)
        for path in sorted(final.parent.glob(OWN))[:-keep]:
            _remove(path)
    distributed.leave_together()  # nobody leaves before the commit


def _remove(path: Path) -> None:
    """Remove a file or a folder, which may be gone already. A folder loses its name first."""
    if path.is_dir() and not path.is_symlink():
        gone = path if TEMPORARY in path.name else path.with_name(f".{path.name}{TEMPORARY}removed")
        if gone != path:
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    """Return a file, or the files and folders of a folder, from the bottom up."""
    if not path.is_dir():
        return [path]
    return [
        Path(root, name) for root, folders, names in os.walk(path, topdown=False) for name in [*names, *folders]
    ] + [path]


def _gathered(distributed: DistributedContext, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of every rank, in the order of ranks. All ranks call it together.

    Args:
        own: this rank's: tensors, numbers, texts, and lists, tuples and dicts of them. What comes from other ranks is read
            without running code.
    """
    written = io.BytesIO()
    torch.save(own, written)
    everyones = RankGroup(distributed.control_group).all_do(lambda: base64.b64encode(written.getvalue()).decode(), list)
    return [torch.load(io.BytesIO(base64.b64decode(state)), weights_only=True) for state in everyones]
