"""Run directories that anybody may have written: every verb that reads them answers, without a traceback and in time."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from slurmtrain.cli import main
from slurmtrain.report.status import queued
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files
from tests.faults.processes import Lane
from tests.faults.rows import Outcome, Trial, row_of_many
from tests.support.run_info import run_info

MUTATIONS_A_PROCESS = 100
HANG_S = 20.0
MEMORY_BYTES = 8 << 30  # a file of a terabyte must not be read into it; torch has reserved some
RUN, OTHER = "20260101-000000-000aa", "20260102-000000-000bb"

OF_TRAINING = (
    *(Event.TRAINING_STARTED, Event.FIRST_STEP, Event.CHECKPOINT, Event.EVALUATED, Event.CAUGHT_UP, Event.ROLLED_BACK),
    *(Event.FIRST_REPORT, Event.TRAINING_STOPPED),
)
VERBS = (
    ["status"],
    ["status", "--json"],
    ["status", RUN],
    ["status", RUN, "--json"],
    ["usage"],
    ["usage", "--json", "--since", "4w"],
    ["usage", RUN, "--by", "run"],
    ["runs", "prune", "--dry-run"],
    ["runs", "compare", RUN, OTHER],
    ["runs", "compare", RUN, OTHER, "--json"],
    ["report", RUN, "--out", "-"],
    ["logs", RUN],
    ["logs", RUN, "--rank", "all"],
    ["checkpoints", RUN],
    ["checkpoints", RUN, "--json"],
    ["checkpoints", RUN, "verify"],
    ["checkpoints", RUN, "prune", "--dry-run"],
)


def write_runs(root: Path) -> None:
    """Two runs with all that a run has; the first is mutated."""
    for run_id, backend in ((RUN, "slurm"), (OTHER, "local")):
        run = RunDir(root / "train" / run_id)
        write_run(run, id=run_id, backend=backend, job_ids=["4711", "4712"] if backend == "slurm" else [])
        evaluation = run.evaluation(4)
        write_run(evaluation, id=evaluation.id, backend=backend, job_ids=["4713"])
        files.write_json(evaluation.result_file, {"step": 4, "time": 1_700_000_400.0, "metrics": {"valid_loss": 2.0}})


def write_run(run: RunDir, **facts: Any) -> None:
    run.attempts.mkdir(parents=True)
    run.checkpoints.mkdir()
    code = {"revision": "0" * 40, "dirty": True}
    more = {"config_hash": "0", "steps": 9, "code": code, "workdir": "code", "submit_dir": "/", "chain_after": 0}
    chain = facts.get("job_ids") or None
    files.write_json(run.info_file, run_info(**{**more, "chain": chain, "packed": False, **facts}))
    run.config_file.write_text("checkpoint: {restore_from: null, keep_last: 2, best_metric: loss, best_mode: min}\n")
    run.code.mkdir()
    (run.code / "train.py").write_text("print()\n")
    run.script.write_text("#!/bin/bash\n")
    files.write_json(run.request_file, {"action": "cancel", "time": 1_700_000_100.0, "by": "me"})
    (run.path / "slurm-4711.log").write_text("x\n")
    for number in (1, 2):
        attempt = run.attempt(number).path
        attempt.mkdir()
        facts = {"number": number, "job_id": "4711", "nodes": ["n0"], "world_size": 2, "pid": 1, "host": "n0"}
        times = {"started": 1_700_000_000.0 + number, "stepping": 1_700_000_002.0, "first_step": 0, "last_step": 4}
        ended = {"ended": 1_700_000_050.0, "reason": "hang", "verdict": "requeue"} if number == 1 else {}
        more = {"start_up_s": {"torch": 1.0}, "stalled": False, "gpus": 4.0, "last_sign": 1_700_000_045.0}
        files.write_json(attempt / "attempt.json", {**facts, **times, **more, **ended})
        (attempt / "job").write_text("4711 0 1700000000.5\n")
        files.write_json(attempt / "hang.json", {"sentence": "rank 1 hangs", "nodes": ["n0"], "time": 1_700_000_040.0})
        files.write_json(
            attempt / "failed-0.json", {"rank": 0, "exit_code": 1, "sentence": "x", "time": 1_700_000_041.0}
        )
        stop = {"cause": "TERM", "cause_time": 1_700_000_050.0, "seconds_left": 3.0, "facts": {"state": "RUNNING"}}
        files.write_json(attempt / "stop.json", stop)
        for rank in (0, 1):
            (attempt / f"rank-{rank}.log").write_text("line\nline\n")
    (run.attempt(2).path / "setup-failed").write_text("no such module\n")
    steps = (
        {"step": n, "loss": 2.0 / n, "tokens_per_s": 9.5, "step_time_s": 0.1, "data_hash": "a"} for n in range(1, 9)
    )
    run.metrics_file.write_text("".join(json.dumps(step) + "\n" for step in steps))
    run.evaluations_file.write_text('{"step": 4, "valid_loss": 2.5}\n')
    events = (
        {"time": 1_700_000_000.0, "event": name, "job_ids": ["1"], "job_id": "4711"}
        for name in ("submitted", Event.GONE_FROM_QUEUE)
    )
    of_training = (
        {"time": 1_700_000_010.0 + place, "event": name, "attempt": 1 + place % 2, "step": place, "seconds": 1.0}
        for place, name in enumerate(OF_TRAINING)
    )
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in (*events, *of_training)))
    for step in (2, 4):
        checkpoint = run.checkpoints / f"checkpoint_{step:07d}"
        checkpoint.mkdir()
        (checkpoint / "manifest.json").write_text(json.dumps({"format": 4, "step": step}))
        (checkpoint / "COMPLETE").write_text("0" * 64)


# Mutations. Each takes a source of chance and a file or folder of a run.

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 2**53, 2**63, 10**400, -(10**400), 1e308, -1e308, float("nan"), float("inf"), 1e-320, 253402300800.0,
    "", "x", "\x1b[2J\x07", "\ud800", "a" * 100_000, "../../etc/passwd", "/dev/zero", "--help", "%s{0}", "4711", [], {}, [[]],
    [None], ["4711", 4711], [1, "x"], {"a": {"b": [1]}}, [{}] * 3, {"\ud800": 1},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def change_a_value(random: Random, path: Path) -> None:
    """Of JSON, or of one line of it, another value somewhere; of other files, other bytes."""
    text = path.read_text() if path.is_file() else ""
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    chosen = random.randrange(len(lines)) if lines else 0
    try:
        values = json.loads(lines[chosen])
    except (ValueError, IndexError):
        return other_bytes(random, path)
    *above, last = [None, *random.choice(list(places(values)))]
    box = {None: copy.deepcopy(values)}
    inside: Any = box
    for key in above:
        inside = inside[key]
    if random.random() < 0.2 and last is not None:
        del inside[last]
    else:
        inside[last] = random.choice(HOSTILE)
    lines[chosen] = json.dumps(box[None])
    path.write_text("\n".join(lines) + "\n")
    return None


def other_bytes(random: Random, path: Path) -> None:
    if path.is_file():
        content = bytearray(path.read_bytes() or b"x")
        for _ in range(random.randint(1, 8)):
            content[random.randrange(len(content))] = random.randrange(256)
        path.write_bytes(content)


def instead(make: Callable[[Path], object]) -> Callable[[Random, Path], object]:
    """Put something else in its place."""

    def replace(random: Random, path: Path) -> None:
        remove(path)
        make(path)

    return replace


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def a_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40 if path.suffix != ".log" else 1 << 24)  # `logs` would print it all, as it should


# Each line stands for twice as many values as the one before.
ALIASES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40))

MUTATIONS: dict[str, Callable[[Random, Path], object]] = {
    "another value": change_a_value,
    "another value somewhere": change_a_value,
    "another value elsewhere": change_a_value,
    "other bytes": other_bytes,
    "cut": lambda random, path: os.truncate(path, random.randrange(path.stat().st_size + 1)) if path.is_file() else None,
    "empty": instead(lambda path: path.touch()),
    "removed": instead(lambda path: None),
    "deep": instead(lambda path: path.write_text("[" * 200_000 + "\n")),
    "deep YAML": instead(lambda path: path.write_text("{a: " * 20_000)),
    "not UTF-8": instead(lambda path: path.write_bytes(b'{"step": 1, "event": "\xff\xfe", "name": "\xff"}\n')),
    "aliases": instead(lambda path: path.write_text(ALIASES)),
    "a pipe": instead(os.mkfifo),
    "a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a link to /": instead(lambda path: path.symlink_to("/")),
    "a folder": instead(lambda path: path.mkdir()),
    "a terabyte": instead(a_terabyte),
    "closed": lambda random, path: path.chmod(0) if not path.is_symlink() else None,
    "a strange name beside it": lambda random, path: path.with_name(
        random.choice(["²", "00٣", "9" * 40, "rank-x.log", "slurm-.log", "slurm-\n.log", "checkpoint_x", os.fsdecode(b"\xff")])
    ).touch(),
    "a strange folder beside it": lambda random, path: path.with_name(
        random.choice(["²", "0003", "9" * 40, "checkpoint_00000001", "checkpoint_" + "9" * 30, os.fsdecode(b"\xff"), "\x1b[2J"])
    ).mkdir(),
}  # fmt: skip


class Hangs(BaseException):
    """A verb takes too long."""


def answers(words: list[str]) -> str | None:
    """Run a verb; what was wrong with how it ended, or None."""

    def stop(*_: object) -> None:
        raise Hangs

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a pipe
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            code = main(words)
            said.flush()
        return None if code in (0, 1, 2, 78) else f"exit code {code}"
    except Hangs:
        return f"takes more than {HANG_S:.0f} s"
    except SystemExit as end:
        return None if end.code in (0, 2) else f"exit code {end.code}"
    except BaseException:
        return traceback.format_exc()[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def mutate_and_read(directory: Path, seeds: list[int]) -> list[tuple[str, str | None]]:
    """Mutate a run in each of these ways, in turn, and read it with every verb: what was done, and what was wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    queued.CONFIRM_EVERY_S = 0.0
    queued._ask = lambda owner, job_ids: queued.Queue()  # SLURM has forgotten all jobs
    os.environ["SLURMTRAIN_RUNS"] = str(directory / "runs")
    healthy = directory / "healthy"
    write_runs(healthy)
    found = []
    for seed in seeds:
        random = Random(seed)
        root = directory / "runs"
        remove(root)
        shutil.copytree(healthy, root, symlinks=True)
        run = root / "train" / RUN
        done = []
        for _ in range(random.choice((1, 1, 2))):
            path = random.choice([path for path in sorted(run.rglob("*")) if os.path.lexists(path)])
            name = random.choice(sorted(MUTATIONS))
            done.append(f"{path.relative_to(run)}: {name}")
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):  # of two mutations
                MUTATIONS[name](random, path)
        wrong = next((f"{' '.join(words)}: {what}" for words in VERBS if (what := answers(list(words)))), None)
        os.chmod(run, 0o700)
        found.append((f"seed {seed}: {', '.join(done)}", wrong))
    return found


@row_of_many("a run directory of any shape", Outcome.ERROR, full=1000, short=20, lanes=1)
def hostile_runs(lane: Lane, count: int) -> Iterator[Trial]:
    while count > 0:
        with lane.trial():
            seeds = [lane.random.randrange(1 << 30) for _ in range(min(count, MUTATIONS_A_PROCESS))]
            count -= len(seeds)
            for done, wrong in lane.fork(mutate_and_read, lane.directory, seeds).result(timeout_s=3600):
                yield Trial(Outcome.UNEXPLAINED, f"{done}: {wrong}") if wrong else Trial(Outcome.ERROR, done)
