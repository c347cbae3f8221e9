"""Run directories as a report meets them: realistic records, composed without a job."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files
from tests.support.run_info import run_info

BEGAN = 1_790_000_000.0
STEP_S = 0.9


def write_config(run: RunDir, **changes: Any) -> None:
    from slurmtrain.config.frozen import freeze
    from slurmtrain.config.schema import Config

    config = Config()
    config.model = {"_target_": "slurmtrain.models.Decoder", "dim": 512, "n_layers": 8, "n_heads": 8, "vocab_size": 256}
    config.data = {"_target_": "slurmtrain.data.StdlibBytes", "seq_len": 512}
    config.train.steps, config.optim.lr = 3000, 6e-4
    config.cluster.nodes, config.cluster.gpus_per_node, config.cluster.tasks_per_node = 2, 4, 4
    config.cluster.partition = "gpu"
    for key, value in changes.items():
        part: Any = config
        *above, last = key.split("__")
        for name in above:
            part = getattr(part, name)
        setattr(part, last, value)
    run.config_file.write_text(freeze(config))


def step_record(step: int, random: Random, *, phases: bool = True, lr: float = 6e-4) -> dict[str, Any]:
    """What a logged step of a healthy training says."""
    loss = 1.2 + 4.2 * math.exp(-step / 350) + 0.05 * random.gauss(0, 1) - 200 * (lr - 6e-4) * math.exp(-step / 900)
    parts = {
        "time_data_s": 0.03 * random.uniform(0.8, 1.4),
        "time_forward_backward_s": 0.62 * random.uniform(0.98, 1.03),
        "time_communication_s": 0.14 * random.uniform(0.9, 1.3),
        "time_optimizer_s": 0.05,
        "time_checkpoint_s": 0.02 if step % 500 < 10 else 0.0,
        "time_evaluation_s": 0.0,
        "time_other_s": 0.01,
    }
    step_time = sum(parts.values())
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 0.4 + 3 * math.exp(-step / 200) * random.uniform(0.7, 1.5),
        "lr": lr * min(1.0, step / 100) * (0.55 + 0.45 * math.cos(math.pi * min(step, 3000) / 3000)),
        "tokens_per_s": 65536 / step_time,
        "step_time_s": step_time,
        "data_wait_s": parts["time_data_s"],
        **(parts if phases else {}),
        "tflops_per_gpu": 212 * 0.85 / step_time,
        "mfu": 0.41 * 0.85 / step_time,
        "memory_allocated_gb": 41.2 + 0.2 * random.random(),
        "memory_reserved_gb": 47.5,
        "data_hash": f"{step:016x}",
    }


def write_metrics(
    run: RunDir, steps: int, *, every: int = 10, seed: int = 1, eval_every: int = 250, lr: float = 6e-4
) -> None:
    random = Random(seed)
    with run.metrics_file.open("w") as file:
        for step in range(every, steps + 1, every):
            file.write(json.dumps(step_record(step, random, lr=lr)) + "\n")
            if step % eval_every == 0:
                learnt = 4 * math.exp(-step / 350) - 150 * (lr - 6e-4) * math.exp(-step / 900)
                loss = 1.32 + learnt + 0.01 * random.random()
                file.write(json.dumps({"step": step, "valid_loss": loss, "perplexity": math.exp(loss)}) + "\n")


def write_attempt(run: RunDir, number: int, **fields: Any) -> None:
    folder = run.attempt(number).path
    folder.mkdir(parents=True, exist_ok=True)
    job = {"job_id": "4711", "nodes": ["gpu07", "gpu12"], "world_size": 8, "kind": "train", "pid": 1, "host": "gpu07"}
    files.write_json(folder / "attempt.json", {"number": number, **job, **fields})


def add_events(run: RunDir, *events: Mapping[str, Any]) -> None:
    with run.events_file.open("a") as file:
        for event in sorted(events, key=lambda each: each["time"]):
            file.write(json.dumps(event) + "\n")


PREEMPTED = {"reason": "preempted", "verdict": "requeue", "exit_code": 75, "said": "stopped"}
FINISHED = {"reason": "finished", "verdict": "done", "exit_code": 0, "said": "finished", "sentence": "finished"}
NOT_COME = "rank 5 did not come to the all_reduce of step 1571"
FAULT = {"node": "gpu12", "event": "hang", "attempt": 2, "lasted_s": 1300.0, "said": NOT_COME, "proven": True}
HUNG = {"reason": "hang", "verdict": "in-place", "exit_code": 70, "failed_on": "gpu12", "fault": FAULT}
HUNG["sentence"] = f"hung: {NOT_COME.replace(' did', ' (gpu12) did')}; its ranks start again in the same job"


def interrupted_run(runs: Path, run_id: str = "20260921-141320-512a0") -> RunDir:
    """A finished run of 3,000 steps that was preempted twice and restarted in place once, after a hang."""
    run = RunDir(runs / "lm" / run_id)
    run.checkpoints.mkdir(parents=True)
    run.attempts.mkdir()
    code = {"revision": "9c1f0e77a1d2b3c4d5e6f708192a3b4c5d6e7f80", "dirty": True}
    overrides = ["+cluster=a100x4", "cluster.nodes=2", "optim.lr=6e-4", "train.steps=3000"]
    submitted: dict[str, Any] = {"user": "ada", "host": "login1", "created": BEGAN, "steps": 3000, "job_ids": ["4711"]}
    made = {"config_hash": "3f2a90c1d7e4", "code": code, "submit_dir": "/home/ada/lm", "workdir": "code"}
    files.write_json(run.info_file, run_info(name="lm", id=run.id, overrides=overrides, **submitted, **made))
    write_config(run)
    write_metrics(run, 3000)
    # Of each attempt: seconds until it starts, seconds of its start-up, first step, last step, step it was committed to.
    spans = [
        (340.0, 38.0, 0, 840, 840),
        (1260.0, 41.0, 840, 1570, 1500),
        (14.0, 19.0, 1500, 2210, 2210),
        (610.0, 40.0, 2210, 3000, 3000),
    ]
    preempted = {**PREEMPTED, "sentence": "preempted; it is requeued"}
    endings: list[dict[str, Any]] = [preempted, HUNG, preempted, FINISHED]
    clock, events = BEGAN, [{"time": BEGAN, "event": Event.SUBMITTED, "job_id": "4711"}]
    for number, ((wait, start_up, first, last, committed), end) in enumerate(zip(spans, endings, strict=True), 1):
        ending, restarts = dict(end), (0, 1, 1, 2)[number - 1]
        started = clock + wait
        stepping = started + start_up
        trained = stepping + STEP_S * (last - first)
        hangs = ending["reason"] == "hang"
        ended = clock = trained + (600.0 if hangs else 0.0) + 6.0

        def at(
            step: int, after_s: float, name: str, stepping: float = stepping, first: int = first, **facts: Any
        ) -> None:
            events.append({"time": stepping + STEP_S * (step - first) + after_s, "event": name, "step": step, **facts})

        if ending["reason"] == "preempted":
            ending |= {"cause": "SIGTERM", "cause_time": trained - 2.0, "seconds_left": 38.0}
        if hangs:
            ending["fault"] = {**FAULT, "run": run.id, "time": ended}
            run.attempt(number).path.mkdir()
            run.attempt(number).hang_page.write_text("# rank 5 did not come\n")
            ending["idle_since"] = trained
        stages = {"interpreter": 0.4, "torch": 4.1, "rendezvous": 3.0, "model": 6.5, "restore": start_up - 14.0}
        times = {"started": started, "stepping": stepping, "ended": ended, "start_up_s": stages}
        steps = {"first_step": first, "last_step": last, "committed_before": first or None, "committed_step": committed}
        write_attempt(run, number, **times, **steps, gpus=8.0, restart_count=restarts, **ending)
        (run.attempt(number).claim_file).write_text(f"4711 {restarts} {started - 4}\n")
        own, on = {"attempt": number}, {"job_id": "4711", "nodes": ["gpu07", "gpu12"], "world_size": 8}
        events.append({"time": started, "event": Event.ATTEMPT_STARTED, **own, **on})
        at(first, -1.0, Event.RESTORED if first else Event.FRESH_START, **own)
        at(first, 0.0, Event.TRAINING_STARTED, **own, start_up_s=stages)
        for step in range(first - first % 250 + 250, last + 1, 250):
            at(step, 0.0, Event.EVALUATED, **own, seconds=4.1)
        events.append({"time": stepping + 9.0, "event": Event.FIRST_STEP, **own, "step": first + 1})
        if not hangs:
            at(last, 0.0, Event.TRAINING_FINISHED if number == 4 else Event.TRAINING_STOPPED, **own)
        for step in sorted({*range(first - first % 500 + 500, committed + 1, 500), *([] if hangs else [committed])}):
            at(step, 2.5, Event.CHECKPOINT, **own, seconds=2.4, stall_s=0.8, size=412_000_000)
        if number == 3:
            at(1570, 0.0, Event.CAUGHT_UP, **own)
            at(1722, 0.0, Event.UPDATE_SKIPPED, **own, skipped=1, loss=math.nan)
        if number == 4:
            slow: dict[str, Any] = {"node": "gpu07", "ranks": [3], "phase": "data", "ratio": 1.62}
            at(2400, 0.0, Event.STRAGGLER, **own, **slow, excess_s=0.05, step_s=0.92)
            at(2640, 0.0, Event.STRAGGLER_OVER, **own, **slow, excess_s=0.05, step_s=0.92)
        why = {name: ending[name] for name in ("reason", "verdict", "sentence")}
        events.append({"time": ended, "event": Event.ATTEMPT_ENDED, **own, **why})
    add_events(run, *events)
    return run


def finished_run(
    folder: Path, run_id: str, *, steps: int = 1000, seed: int = 1, lr: float = 6e-4, **info: Any
) -> RunDir:
    """A run that finished in its only attempt."""
    run = RunDir(folder / run_id)
    run.checkpoints.mkdir(parents=True)
    run.attempts.mkdir()
    facts = {"name": folder.name, "id": run_id, "user": "ada", "created": BEGAN, "steps": steps, "job_ids": ["4800"]}
    files.write_json(run.info_file, run_info(**{**facts, **info}))
    write_config(run, train__steps=steps, optim__lr=lr)
    write_metrics(run, steps, seed=seed, lr=lr, eval_every=100)
    started, stepping = BEGAN + 60.0, BEGAN + 90.0
    ended = stepping + STEP_S * steps
    times = {"started": started, "stepping": stepping, "ended": ended}
    write_attempt(run, 1, **times, first_step=0, last_step=steps, committed_step=steps, gpus=8.0, **FINISHED)
    events = [
        ("submitted", BEGAN),
        ("attempt started", started),
        ("training started", stepping),
        ("training finished", ended),
    ]
    add_events(run, *({"time": time, "event": name, "attempt": 1} for name, time in events))
    return run


def sweep_of_eight(runs: Path) -> Path:
    """A sweep over four learning rates and two widths; one point failed, and all others finished."""
    folder = runs / "lm.sweep-4f1c2a"
    (folder / "arrays").mkdir(parents=True)
    info = {"created": BEGAN, "slurm_conf": None, "pack": 1, "backend": "slurm", "overrides": ["optim.lr=..."]}
    files.write_json(folder / "sweep.json", {**info, "token": "t"})
    lines, number = [], 0
    for lr in (3e-4, 6e-4, 1.2e-3, 2.4e-3):
        for size in ("small", "medium"):
            run_id = f"20260921-141320-00{number}ab"
            run = finished_run(folder, run_id, seed=number, lr=lr, job_ids=[f"4800_{number}"], name="lm")
            varied = {"optim.lr": f"{lr:g}", "model": size}
            point = {"number": number, "varied": varied, "identity": f"{number:012x}", "shape": "s", "run_id": run_id}
            lines.append(json.dumps(point))
            if number == 7:  # it has crashed
                path = run.attempt(1).record_file
                crashed: dict[str, Any] = {
                    "reason": "crash",
                    "verdict": "end",
                    "exit_code": 1,
                    "said": None,
                    "last_step": 300,
                }
                sentence = "rank 3: RuntimeError: CUDA error: an illegal memory access was encountered"
                files.write_json(path, {**json.loads(path.read_text()), **crashed, "sentence": sentence})
                kept = [line for line in run.metrics_file.read_text().splitlines() if json.loads(line)["step"] <= 300]
                run.metrics_file.write_text("".join(f"{line}\n" for line in kept))
            number += 1
    (folder / "points.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder
