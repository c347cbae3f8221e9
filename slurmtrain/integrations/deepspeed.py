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
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.state import RandomState
from slurmtrain.errors import ConfigError
from slurmtrain.integrations.commit import (
    commit,
    damage_of,
    damage_of_zip,
    flush,
    gather_states,
    keep_newest,
    note_files,
    remove,
    set_aside,
    temporary_name,
)
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.runs.program_checkpoints import cut
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
        final, first = self._folder / f"step_{step:09d}", self._distributed.environment.rank == 0
        temporary = temporary_name(final)
        if first:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove(temporary)
        self._distributed.leave_together()  # the folder is there, and empty
        ours = {"step": step, "random": gather_states(self._distributed, RandomState().state_dict())}
        self._engine.save_checkpoint(
            str(temporary), tag=TAG, client_state={**(client_state or {}), OURS: ours}, save_latest=False
        )
        self._distributed.leave_together()  # all have written
        if self._distributed.environment.local_rank == 0:
            flush(temporary)
        self._distributed.leave_together()  # all is on the disk
        if first:
            note_files(temporary)
            commit(temporary, final)
            keep_newest(self._folder, OWN, self._keep)
        self._distributed.leave_together()
        self._saved = step
        if self._report is not None:
            self._report.saved(step, final)

    def restore(self) -> int:
        """Load the newest checkpoint that is not damaged into the engine, and the random state of every rank.

        Newer ones, which are damaged, get hidden names. If all are damaged they keep theirs.

        Returns:
            The number of steps that are done; 0: there is no checkpoint, and nothing was changed.

        Raises:
            CheckpointError: DeepSpeed has not loaded it; or there are checkpoints, and all are damaged.
        """
        names: list[str] = []
        if self._distributed.environment.rank == 0:
            names = sorted((path.name for path in self._folder.glob(OWN)), reverse=True)
        names = self._distributed.broadcast_text("/".join(names)).split("/")
        if not names[0]:
            self._report = ProgressReport(0, self._steps)
            return 0
        for place, name in enumerate(names):
            client_state = self._load(self._folder / name)
            if client_state is not None:
                for damaged in names[:place] if self._is_first else ():  # nobody reads them any more
                    set_aside(self._folder / damaged)
                return self._loaded(self._folder / name, client_state)
        raise CheckpointError(
            f"all {len(names)} checkpoints in {self._folder} are damaged",
            hint="remove them from that folder to begin at step 0",
        )

    def _load(self, checkpoint: Path) -> Mapping[str, Any] | None:
        """Load a checkpoint, and return its client state on all ranks; None: it is damaged.

        Raises:
            CheckpointError: DeepSpeed does not load it, and its files are what was written.
        """
        if self._is_damaged(damage_of(checkpoint) if self._is_first else None, checkpoint):
            return None
        partitioned = self._engine.zero_optimization_partition_weights()
        if partitioned and self._is_damaged(self._damage_of_parts(checkpoint), checkpoint):
            return None
        failed, loaded, client_state = "", None, {}
        try:
            loaded, client_state = self._engine.load_checkpoint(str(checkpoint), tag=TAG)
        except Exception as error:  # whatever torch.load makes of a file that is damaged inside
            failed = f"{type(error).__name__}: {error}"
            if partitioned:  # the others wait for this rank within DeepSpeed, and end when it leaves
                raise CheckpointError(f"DeepSpeed cannot load {checkpoint}: {failed.splitlines()[0]}") from error
        states = gather_states(self._distributed, {"loaded": loaded is not None, "failed": failed})
        if all(each["loaded"] for each in states):
            return client_state
        if self._is_damaged(damage_of(checkpoint, thorough=True) if self._is_first else None, checkpoint):
            return None
        failed = next((f": {each['failed'].splitlines()[0]}" for each in states if each["failed"]), "")
        raise CheckpointError(
            f"DeepSpeed cannot load {checkpoint}{failed}",
            hint="a checkpoint needs the number of ranks and the ZeRO stage that it was saved with",
        )

    def _damage_of_parts(self, checkpoint: Path) -> str | None:
        """Say what is wrong with the parts of the ranks, each of which has read its own; None if nothing is.

        In ZeRO stage 3 all ranks load together, so that they have to know before whether all can.

        Raises:
            CheckpointError: a rank cannot read its part now, which may be whole.
        """
        own = f"zero_pp_rank_{self._distributed.environment.rank}_"
        found = unreadable = ""
        try:
            for path in sorted((checkpoint / TAG).glob(f"*{own}*")):
                reason = cut(path) or (damage_of_zip(path) if zipfile.is_zipfile(path) else None)
                found = found or (f"{path.relative_to(checkpoint)}: {reason}" if reason else "")
        except OSError as error:
            unreadable = f"{path.relative_to(checkpoint)} on {self._distributed.environment.node}: {error.strerror}"
        states = gather_states(self._distributed, {"found": found, "unreadable": unreadable})
        if unreadable := next((each["unreadable"] for each in states if each["unreadable"]), ""):
            raise CheckpointError(f"{checkpoint} cannot be read: {unreadable}")
        return next((each["found"] for each in states if each["found"]), None)

    @property
    def _is_first(self) -> bool:
        return self._distributed.environment.rank == 0

    def _is_damaged(self, damage: str | None, checkpoint: Path) -> bool:
        """Tell all ranks what rank 0 has found, and say it."""
        damage = self._distributed.broadcast_text(damage or "")
        if damage and self._is_first:
            log.warning("%s is damaged; loading the one before it: %s", checkpoint, damage)
        return bool(damage)

    def _loaded(self, checkpoint: Path, client_state: Mapping[str, Any]) -> int:
        """Take over what was saved beside the engine, and return the step."""
        self.client_state = {key: value for key, value in client_state.items() if key != OURS}
        states, rank = client_state[OURS]["random"], self._distributed.environment.rank
        if len(states) == self._distributed.environment.world_size:
            RandomState().load_state_dict(states[rank])
        step = int(client_state[OURS]["step"])
        if rank == 0:
            log.info("resuming at step %d from %s", step, checkpoint)
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
