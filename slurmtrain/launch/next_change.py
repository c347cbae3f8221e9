"""`requeue RUN key=value`: change a run for its next attempt.

Of a run that is at work, the change is kept in its directory, and made when its ranks have all left: by the batch script, which
then submits a new job with the changed script, or by cluster=local. Where SLURM itself has started the job again meanwhile, the
job makes it, and leaves to a new one if its own script does not stay what it is.
Of a run whose job is pending, it is made at once; the job is kept if its script stays what it is, but for what `scontrol
update` can change.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, SlurmtrainError, UsageError
from slurmtrain.launch import changes
from slurmtrain.launch.change_rules import describe
from slurmtrain.launch.directives import directive
from slurmtrain.launch.resubmit import waiting_for
from slurmtrain.launch.script import render_script
from slurmtrain.launch.submit import job_paths, submit_existing_script
from slurmtrain.runs import reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_states import JobState
from slurmtrain.system import records
from slurmtrain.system.files import read_json, write_json

log = logging.getLogger(__name__)

TRIES = 3  # at most, of a change whose maker is killed each time

# Options of sbatch that are changed in a pending job -> scontrol's names for them. The number of nodes is not among them:
# the job's number of tasks would stay what it was.
UPDATABLE = {"time": "TimeLimit", "partition": "Partition", "qos": "QOS"}


@contextlib.contextmanager
def record_next_change(
    run_dir: RunDir, overrides: Sequence[str], cwd: Path, client: SlurmClient | None
) -> Iterator[list[str]]:
    """Keep a change for the run's next attempt, after all checks, and yield sentences that say what will be different.

    It is added to one that is kept already. If the block fails, only the latter is kept.

    Args:
        client: asked whether SLURM accepts the changed script; None: there is none.

    Raises as `changes.change`.
    """
    kept = _read_next_change(run_dir)
    earlier = list(kept["set"]) if kept is not None else []
    present = load_frozen(run_dir.config_file, with_secrets=False)
    if kept is not None and kept["cwd"] != str(cwd):  # to which paths are relative
        raise UsageError(
            f"{' '.join(earlier)} already waits for the next attempt of run {run_dir.id}, typed in {kept['cwd']}",
            hint="type this command there, too",
        )
    before = changes.plan(run_dir, present, earlier, cwd)[0] if earlier else present
    after, words = changes.plan(run_dir, before, overrides, cwd)
    if client is not None:
        changes.check_accepted(run_dir, _script(run_dir, after), client)
    lines = describe(before, after, reached_step.newest_checkpoint_step(run_dir))
    write_json(run_dir.next_change_file, {"set": [*earlier, *words], "cwd": str(cwd), "asked": time.time()})
    try:
        yield lines
    except BaseException:
        if kept is not None:
            write_json(run_dir.next_change_file, kept)
        else:
            run_dir.next_change_file.unlink(missing_ok=True)
        raise
    run_dir.event(Event.CHANGE_ASKED, set=words)


def apply_next_change(run_dir: RunDir) -> bool:
    """Make the change that is kept for the next attempt, and return whether there was one.

    Called when no rank is at work, by whoever starts the next attempt. A change that cannot be made any more is recorded, and
    the run goes on without it. So it does when the process that was to make it has ended several times before it was made:
    the job would be started again for the sake of the change without end.
    """
    kept = _read_next_change(run_dir)
    if kept is None:
        return False
    tries = kept["tries"] if records.is_count(kept.get("tries")) else 0
    asked = kept["asked"] if records.is_time(kept.get("asked")) else None
    made = asked is not None and any(
        change.get("asked") == asked for change in run_dir.info().get("changes") or () if isinstance(change, dict)
    )
    try:
        if tries >= TRIES and not made:
            raise ClusterError(f"{tries} processes that should make the change ended without making it")
        write_json(run_dir.next_change_file, {**kept, "tries": tries + 1})
        changes.undo_unfinished(run_dir)
        if not made:
            for line in changes.change(run_dir, kept["set"], Path(kept["cwd"]), asked=asked):
                log.info(line)
    except Exception as error:  # whatever it is, the next try would meet it again
        why = _why(error)
        log.warning("the run continues without %s: %s", " ".join(kept["set"]), why, exc_info=_is_ours(error))
        run_dir.event(Event.NOT_CHANGED, set=kept["set"], why=why)
        run_dir.next_change_file.unlink(missing_ok=True)
        with contextlib.suppress(Exception):  # so that no half of it stays
            changes.undo_unfinished(run_dir)
        return False
    run_dir.next_change_file.unlink(missing_ok=True)
    return True


def _is_ours(error: Exception) -> bool:
    """Return whether an error is a mistake of this program's, of which the place should be known."""
    return not isinstance(error, SlurmtrainError | OSError)


def _why(error: Exception) -> str:
    if isinstance(error, SlurmtrainError):
        return error.message
    return f"{type(error).__name__}: {error}" if _is_ours(error) else str(error)


def make_in_this_job(run_dir: RunDir) -> bool:
    """Make the change that is kept for the next attempt, unless a job with another script is needed; return False then.

    Called by a job that SLURM has started again, before its ranks start. A change that cannot be made any more is dropped, as
    `apply_next_change` does.
    """
    kept = _read_next_change(run_dir)
    if kept is None:
        return True
    try:
        present = load_frozen(run_dir.config_file, with_secrets=False)
        after, _ = changes.plan(run_dir, present, kept["set"], Path(kept["cwd"]))
        same = updates(run_dir.script.read_text(), _script(run_dir, after)) == {}
    except Exception:  # which is told there
        same = True
    if same:
        apply_next_change(run_dir)
    return same


def change_pending(run_dir: RunDir, job_id: str, overrides: Sequence[str], cwd: Path, client: SlurmClient) -> list[str]:
    """Change a run whose job waits in the queue, and return sentences. Called only by who has claimed the run.

    The job is held meanwhile, so that it cannot start with one half of the change. If it cannot be kept, a new job takes its
    place: it is submitted first and waits for the old one, which is then cancelled. Whoever was killed in between types the
    command again.

    Raises:
        ClusterError: the job has started, or SLURM does not answer or refuses. Nothing is changed then.
        Others as `changes.change`.
    """
    present = load_frozen(run_dir.config_file, with_secrets=False)
    after, _ = changes.plan(run_dir, present, overrides, cwd)  # before the job is touched
    changes.check_accepted(run_dir, _script(run_dir, after), client)
    facts = client.look(job_id)
    waits = facts is not None and facts.reason == "Dependency"
    client.hold(job_id)
    try:
        facts = client.look(job_id)
        if facts is None or facts.state != JobState.PENDING:
            raise ClusterError(
                f"job {job_id} of run {run_dir.id} has just started",
                hint="repeat the command to change its next attempt",
            )
        old = client.batch_script(job_id)  # what is in the run directory may be of a change that was cut short
        changes.undo_unfinished(run_dir)
        lines = changes.change(run_dir, overrides, cwd)
    except BaseException:
        client.release(job_id)
        raise
    new = run_dir.script.read_text()
    again = len(run_dir.info().get("changes") or ()) > 1
    fields = updates(old, new, all_of_them=again)
    if fields is not None and _updated(client, job_id, fields):
        client.release(job_id)
        return lines
    return [*lines, _in_a_new_job(run_dir, job_id, client, waits=waits)]


def updates(old: str, new: str, *, all_of_them: bool = False) -> dict[str, str] | None:
    """Return what `scontrol update` has to change in a pending job so that it is as if submitted with the new script.

    The result is None if the scripts differ in more than that.

    Args:
        all_of_them: the job may have been updated before, so that its own script no longer says what it is.
    """
    fields: dict[str, str] = {}
    for name, field in UPDATABLE.items():
        before, after = _option(old, name), _option(new, name)
        if before is not None and after is None:
            return None
        if after is not None and (all_of_them or before != after):
            fields[field] = after
    return fields if _without(old) == _without(new) else None


def _option(script: str, name: str) -> str | None:
    return next(
        (each.partition("=")[2] for each in changes.resources(script) if each.partition("=")[0] == f"--{name}"), None
    )


def _without(script: str) -> list[str]:
    """Return the lines of a script without those of `UPDATABLE`, and without its comments."""
    left = tuple(f"#SBATCH --{name}=" for name in UPDATABLE)
    lines = script.splitlines()
    return [line for line in lines if not line.startswith(left) and (line.startswith("#SBATCH") or line[:1] != "#")]


def _updated(client: SlurmClient, job_id: str, fields: dict[str, str]) -> bool:
    if not fields:
        return True
    try:
        client.update_pending(job_id, **fields)
    except ClusterError as error:
        log.info("job %s could not be changed, so a new job replaces it: %s", job_id, error.message)
        return False
    return True


def _in_a_new_job(run_dir: RunDir, job_id: str, client: SlurmClient, *, waits: bool) -> str:
    """Let a new job take the place of a held one.

    Args:
        waits: the held job waits for others still, which submit_existing_script takes for a thing of the past.
    """
    others = directive(run_dir.script.read_text(), "dependency") if waits else None

    def after(script: str) -> list[str]:
        return [f"--dependency=afterany:{job_id},{others}"] if others else waiting_for(script, [job_id])

    try:
        new = submit_existing_script(run_dir, after)
    except ClusterError as error:
        raise ClusterError(
            f"run {run_dir.id} has been changed, but has no job with the changed script: {error.message}",
            hint=f"its job {job_id} is held: repeat the command, or cancel {run_dir.id}",
        ) from None
    try:
        client.pass_on_dependents(job_id, new)
    except ClusterError as error:
        log.warning("jobs that wait for this run may never start: %s", error.message)
    client.cancel(job_id)
    return f"job {new} takes the place of job {job_id}"


def _script(run_dir: RunDir, config: Config) -> str:
    return render_script(config, job_paths([run_dir.path], run_dir.info()))


def kept_for_next_attempt(run_dir: RunDir) -> list[str]:
    """Return what will be set before the run's next attempt, as KEY=VALUE; nothing if no change is kept."""
    kept = _read_next_change(run_dir)
    return list(kept["set"]) if kept is not None else []


def _read_next_change(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the change that is kept for the next attempt, if it can be read."""
    kept = read_json(run_dir.next_change_file)
    if kept is None or not isinstance(kept.get("set"), list) or not isinstance(kept.get("cwd"), str):
        return None
    return kept if all(isinstance(word, str) for word in kept["set"]) else None
