"""DeepSpeed engines under slurmtrain: checkpoints of any ZeRO stage that are complete or not there, and found again.

    slurmtrain.init()  # instead of deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    checkpoints = EngineCheckpoints(engine)
    for step in range(checkpoints.restore(), steps):
        ...
        checkpoints.save_at_stop(step + 1)

The files are DeepSpeed's own, so that a checkpoint can be loaded without us: engine.load_checkpoint(FOLDER, tag="engine").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.state import RandomState
from slurmtrain.errors import ConfigError
from slurmtrain.integrations.commit import gather_states, save_together
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.runtime.api import exit_for_requeue, session, should_stop

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
OWN = "step_*"
TAG = "engine"  # DeepSpeed's name for the state within a checkpoint
OURS = "slurmtrain"  # our key in DeepSpeed's client_state


class EngineCheckpoints:
    """The checkpoints of one DeepSpeed engine in one folder. All ranks make it, and call its methods, together.

    Args:
        engine: what `deepspeed.initialize` returns first.
        folder: shared by all ranks; None: `deepspeed` in the run directory, or ./deepspeed.
        keep: how many checkpoints stay.
        steps: the step at which training ends, for `status`; None: not known.

    Raises:
        RuntimeError: `slurmtrain.init` has not been called.
        ConfigError: the engine's own saves go on in the background, so that nobody knows when they are complete.
    """

    def __init__(self, engine: Any, folder: Path | str | None = None, *, keep: int = 2, steps: int | None = None):
        self._distributed = session.initialised()[0]
        if engine.checkpoint_engine.is_decoupled():
            raise ConfigError(
                f"DeepSpeed's {type(engine.checkpoint_engine).__name__} saves in the background, and does not say when "
                "a checkpoint is complete",
                hint="leave checkpoint_engine out of DeepSpeed's config",
            )
        if folder is None:
            folder = session.context.run_dir.path / "deepspeed" if session.context is not None else "deepspeed"
        self._engine, self._folder, self._keep, self._steps = engine, Path(folder), keep, steps
        self._report: ProgressReport | None = None
        self._logged = 0.0  # when, by the monotonic clock
        self._saved: int | None = None
        self.client_state: dict[str, Any] = {}

    def save(self, step: int, client_state: Mapping[str, Any] | None = None) -> None:
        """Save the state after `step` steps; it is on the disk when this returns.

        Args:
            client_state: as for `engine.save_checkpoint`; `restore` leaves it in `client_state`.
        """
        if step == self._saved:
            return
        final = self._folder / f"step_{step:09d}"
        ours = {"step": step, "random": gather_states(self._distributed, RandomState().state_dict())}

        def write(temporary: Path) -> None:
            self._engine.save_checkpoint(
                str(temporary), tag=TAG, client_state={**(client_state or {}), OURS: ours}, save_latest=False
            )

        save_together(self._distributed, final, write, pattern=OWN, keep=self._keep)
        self._saved = step
        if self._report is not None:
            self._report.saved(step, final)

    def restore(self) -> int:
        """Load the newest checkpoint into the engine, and the random state of every rank.

        Returns:
            The number of steps that are done; 0: there is no checkpoint, and nothing was changed.

        Raises:
            CheckpointError: DeepSpeed has not loaded it.
        """
        rank, newest = self._distributed.environment.rank, ""
        if rank == 0:
            newest = max((path.name for path in self._folder.glob(OWN)), default="")
        newest = self._distributed.broadcast_text(newest)
        if not newest:
            self._report = ProgressReport(0, self._steps)
            return 0
        loaded, client_state = self._engine.load_checkpoint(str(self._folder / newest), tag=TAG)
        if loaded is None:
            raise CheckpointError(
                f"DeepSpeed has not loaded {self._folder / newest}",
                hint="a checkpoint needs the number of ranks and the ZeRO stage that it was saved with",
            )
        self.client_state = {key: value for key, value in client_state.items() if key != OURS}
        states, step = client_state[OURS]["random"], int(client_state[OURS]["step"])
        if len(states) == self._distributed.environment.world_size:
            RandomState().load_state_dict(states[rank])
        if rank == 0:
            log.info("resuming at step %d from %s", step, self._folder / newest)
        self._saved, self._report = step, ProgressReport(step, self._steps)
        return step

    def save_at_stop(self, step: int, client_state: Mapping[str, Any] | None = None) -> None:
        """Save and leave with exit code 75, if a rank was told to stop. Call it after every step, on every rank."""
        if self._report is not None and time.monotonic() >= self._logged + LOG_EVERY_S:
            self._logged = time.monotonic()
            self._report.log(step)
        if should_stop():
            self.save(step, client_state)
            exit_for_requeue()
