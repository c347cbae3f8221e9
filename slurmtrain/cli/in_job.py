"""The verbs that a job runs: supervise, train on every rank, prepare, and progress, by which a program reports its step.

Each imports what it needs when it is called: signal handlers come first, and a rank shall not wait for the others' modules.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from base64 import b64decode
from pathlib import Path

from slurmtrain.errors import EXIT_REQUEUE, EnvironmentMismatchError, UsageError


def supervise(options: argparse.Namespace) -> int:
    """Do what a batch script asks for: supervise runs, or take a role beside them."""
    from slurmtrain.runs.run_dir import RunDir

    run_dirs = [RunDir(Path(path)) for path in options.run_dir]
    if options.hook is not None:
        from slurmtrain.supervise.hooks import run_hook

        run_hook(run_dirs[0], options.hook)
        return 0
    if options.watch is not None:
        from slurmtrain.choices import RequeueMode
        from slurmtrain.config.frozen import load_frozen
        from slurmtrain.supervise.in_place import watch_over

        requeue = load_frozen(run_dirs[0].config_file, with_secrets=False).requeue
        watch_over(options.job, options.watch, requeues=requeue.mode == RequeueMode.REQUEUE)
        return 0
    submitted = None
    if options.environment is not None:  # of `env -0`, in base64: kept in memory only, since there may be secrets in it
        with os.fdopen(options.environment, "rb") as file:
            entries = b64decode(file.read(), validate=True).split(b"\0")
        pairs = [entry.partition(b"=") for entry in entries if entry]
        submitted = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    from slurmtrain.supervise.platforms.ray import IN_RAY_JOB, supervise_ray_job

    if IN_RAY_JOB in os.environ:
        return supervise_ray_job(run_dirs[0])
    from slurmtrain.supervise import loop

    if len(run_dirs) > 1:
        return loop.supervise_together(run_dirs, submitted, options.set_up_failed)
    from slurmtrain.runs.ownership import require_own
    from slurmtrain.slurm.environment import JOB_VARIABLE

    require_own(run_dirs[0])
    if "SLURM_JOB_ID" not in os.environ or JOB_VARIABLE in os.environ:  # SkyPilot starts pods in a job of SLURM
        from slurmtrain.supervise.platforms.pods import own_pod, supervise_pod

        if (pod := own_pod()) is not None:
            return supervise_pod(run_dirs[0], pod)
    if "SLURM_JOB_ID" not in os.environ:
        raise EnvironmentMismatchError(
            "this is neither a job of SLURM nor a pod: SLURM_JOB_ID, JOB_COMPLETION_INDEX and PET_NODE_RANK are not set",
            hint="`submit` and `resume` start runs; pods need a manifest as `render --target` writes it",
        )
    from slurmtrain.supervise.platforms.slurm import SlurmJob

    return loop.supervise(run_dirs[0], SlurmJob(run_dirs[0], submitted), options.set_up_failed)


def train(options: argparse.Namespace) -> int:
    """Run this process as a rank of a training job; it does not return."""
    from slurmtrain.system import signals

    signals.install_signal_handlers()  # before anything heavy is imported
    gc.set_threshold(700)  # as Python has it: what hangs in a cycle may be a tensor of the GPU

    from slurmtrain.rank import main as rank
    from slurmtrain.runs.run_dir import RunDir
    from slurmtrain.slurm.environment import Environment
    from slurmtrain.system.paths import current_folder, located

    overrides: list[str] = options.overrides
    if options.run_directory is not None:
        if overrides:
            raise UsageError(
                f"`train {options.run_directory}` takes its config only from the run directory",
                hint="without a run directory, it accepts overrides: key=value train",
            )
        run_dir = RunDir(located(Path(options.run_directory)))
        run_dir.info()
        rank.run_submitted(run_dir)

    from slurmtrain.cli.submit import compose_and_validate
    from slurmtrain.launch.submit import preparing

    explicit = any(word.split("=")[0] in ("cluster.nodes", "cluster.tasks_per_node") for word in overrides)
    if not explicit:  # by hand, srun or torchrun decides the number of ranks
        environment = Environment.detect()
        even = len(set(environment.tasks_per_node)) == 1
        by_hand = not any(word.startswith("cluster=") for word in overrides)
        overrides += [
            f"cluster.nodes={len(environment.nodes) if even else 1}",
            f"cluster.tasks_per_node={environment.tasks_per_node[0] if even else environment.world_size}",
        ]
        if environment.world_size > 1 and by_hand:
            overrides += ["cluster.backend=slurm", "cluster.network_interface=auto"]
    config, _ = compose_and_validate(options)

    def create() -> RunDir:
        with preparing(config, overrides, current_folder()) as run_dir:
            return run_dir

    rank.run_by_hand(config, create, strict=explicit)


def prepare(options: argparse.Namespace) -> int:
    """Make tokenised shards from raw text, in this process; or check those that were made."""
    if options.action == "verify":
        return _verify(Path(options.folder))
    from slurmtrain.system import signals

    stop = signals.install_signal_handlers()
    from slurmtrain.cli.submit import compose_and_validate
    from slurmtrain.data.prepare.finish import finish
    from slurmtrain.data.prepare.unit_plan import agree_on, make_plan
    from slurmtrain.data.prepare.worker_pool import work
    from slurmtrain.launch.named_paths import with_absolute_paths
    from slurmtrain.observe.progress import Preparing
    from slurmtrain.rank.jobs.prepare import share_of, summary, workers_of
    from slurmtrain.slurm.environment import Environment
    from slurmtrain.system.paths import current_folder

    options.overrides.insert(0, "job=prepare")
    config = with_absolute_paths(compose_and_validate(options)[0], current_folder())
    environment, plan, most_bad = Environment.detect(), make_plan(config.prepare), config.prepare.max_bad_share
    agree_on(plan)
    share, workers, progress = share_of(plan, config, environment), workers_of(config, environment), Preparing()
    finished = work(plan, share, workers, lambda: stop.requested, progress.show)
    manifest = finish(plan, most_bad) if finished else None
    if not finished:
        print("slurmtrain: stopped; finished units are kept, and the same command continues from there", flush=True)
        return EXIT_REQUEUE
    print(f"slurmtrain: {summary(plan, manifest)}", flush=True)
    return 0


def _verify(folder: Path) -> int:
    from slurmtrain.data.format.manifest import read_manifest, verify

    problems, manifest = 0, read_manifest(folder)
    for problem in verify(folder, manifest):
        print(problem, flush=True)
        problems += 1
    if problems:
        print(
            f"{problems} damaged or missing: remove the folders with numbers that hold them, and repeat the prepare command"
        )
        return 1
    counts = ", ".join(f"{name}: {split.tokens} tokens" for name, split in manifest.splits.items())
    print(f"{folder} is unchanged ({counts}); fingerprint {manifest.fingerprint}")
    return 0


def progress(options: argparse.Namespace) -> int:
    """Append a line {"step": STEP} to the run's metrics.jsonl; on other ranks than 0 do nothing.

    Raises:
        UsageError: this process is not part of a run.
    """
    from slurmtrain.runs import attempts
    from slurmtrain.runs.reasons import Event
    from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
    from slurmtrain.slurm.environment import rank_or_zero
    from slurmtrain.system.records import append_line

    directory = os.environ.get(RUN_DIR_VARIABLE)
    if not directory:
        raise UsageError(
            "`progress` works only inside a run: SLURMTRAIN_RUN_DIR is not set",
            hint="it is for a program that was submitted: submit -- bash my_script.sh",
        )
    run_dir = RunDir(Path(directory))
    info = run_dir.info()
    if rank_or_zero() != 0:
        return 0
    if options.of is not None and info.get("steps") != options.of:
        run_dir.update_info(steps=options.of)
    step, number = options.step, os.environ.get(ATTEMPT_VARIABLE, "")
    attempt = attempts.read_attempt(run_dir, int(number)) if number.isdigit() else None
    record: dict[str, float] = {"step": step}
    if attempt is not None:
        # For goodput: the first report of this attempt, and the one that is where an earlier attempt had been.
        logged = run_dir.metrics_file.stat().st_mtime if run_dir.metrics_file.exists() else 0.0
        before = attempts.last_logged_step(run_dir) if logged >= attempt.started else None
        furthest = attempt.reported_before
        if before is None:
            run_dir.event(Event.FIRST_REPORT, attempt=attempt.number, step=step)
        elif furthest is not None and before < furthest <= step:
            run_dir.event(Event.CAUGHT_UP, attempt=attempt.number, step=step)
        if before is not None and before < step and attempt.started > 0:
            record["step_time_s"] = (time.time() - logged) / (step - before)
    append_line(run_dir.metrics_file, json.dumps(record) + "\n")
    return 0
