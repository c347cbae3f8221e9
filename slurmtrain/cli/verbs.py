"""The verbs: what each does, and where its code is. The one list that parsing, help and completion read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """Attributes:
    module: its `main(arguments)` for a verb that composes a config, `main(verb, words)` for the others.
    options: flags of a verb that composes a config -> whether a value follows.
    """

    usage: str
    help: str
    module: str
    composes: bool = False
    hidden: bool = False
    options: tuple[tuple[str, bool], ...] = ()


VERBS: dict[str, Verb] = {
    "submit": Verb(
        "[-m] [+cluster=NAME] [key=value ...] submit [--dry-run] [--follow] [--after RUN[,RUN]] [--json]"
        " [--array-parallelism N] [--again] [-- PROGRAM WORD ...]",
        "submit a run, or run it here with cluster=local; what follows -- is a program of your own, word for "
        "word; --dry-run prints what sbatch would get; --follow shows what rank 0 prints until the run has ended, and leaves "
        "with the run's own code (0 finished, 75 stopped and can be resumed, 78 config or environment wrong, else 1); "
        "--after starts it when other runs have finished. With -m and choices (key=1,2) a sweep: all points as one array, N "
        "at a time; the same command again submits only what is missing. sweep.pack=4 lets four small runs share each task; "
        "with cluster=local the points run here, one after the other. With -m hydra/sweeper=optuna a search, which waits "
        "for results",
        "slurmtrain.cli.submit",
        composes=True,
        options=(
            ("--dry-run", False),
            ("--follow", False),
            ("--after", True),
            ("--array-parallelism", True),
            ("--again", False),
            ("--json", False),
        ),
    ),
    "render": Verb(
        "[+cluster=NAME] [key=value ...] render [-o FILE]",
        "the same script, to read, edit and hand to sbatch; -o prepares a run for it",
        "slurmtrain.cli.submit",
        composes=True,
        options=(("-o", True), ("--output", True)),
    ),
    "train": Verb(
        "[key=value ...] train [RUN_DIRECTORY]",
        "what every rank runs; also by hand: python, srun or torchrun -m slurmtrain train",
        "slurmtrain.cli.train",
        composes=True,
    ),
    "status": Verb(
        "status [RUN] [-w] [--json]",
        "all runs, or one: attempts, step, loss, tokens/s, ETA, why it waits and when SLURM expects to start it; -w (--watch) "
        "draws it anew until all has ended; --json for programs",
        "slurmtrain.cli.runs",
    ),
    "runs": Verb(
        "runs list | compare A B | prune [--older-than DAYS] [--state STATE ...] [--dry-run] ...",
        "what runs there are; what differs between two, and from which step on; remove those that have ended. "
        "list and compare take --json",
        "slurmtrain.cli.manage",
    ),
    "logs": Verb(
        "logs RUN [-f] [--rank N|all] [--attempt N]",
        "a rank's output, or that of all; -f follows it through all attempts",
        "slurmtrain.cli.logs",
    ),
    "cancel": Verb("cancel RUN", "stop for good; saves if time allows", "slurmtrain.cli.runs"),
    "preempt": Verb(
        "preempt RUN", "a drill: the signal of a preemption; it saves, is requeued, resumes", "slurmtrain.cli.runs"
    ),
    "requeue": Verb("requeue RUN", "save and start again; a waiting or held job starts now", "slurmtrain.cli.runs"),
    "resume": Verb("resume RUN", "continue a run that has ended, from its newest checkpoint", "slurmtrain.cli.runs"),
    "sweep": Verb(
        "sweep list | status SWEEP [-w] | collect SWEEP [-o FILE] [--plot FILE] | retry SWEEP | cancel SWEEP [--json]",
        "the sweeps; how the points of one stand, live with -w; their metrics as a table or a picture; what failed once "
        "more; the end of all",
        "slurmtrain.cli.sweep",
    ),
    "checkpoints": Verb(
        "checkpoints RUN [list | verify [STEP] | prune [--dry-run] ... | export OUT ...]",
        "what a run can be resumed from (RUN: also a directory of checkpoints, or one); verify compares every file with its "
        "digest; prune removes what need not be kept; export writes the weights as OUT.safetensors or OUT.pt",
        "slurmtrain.cli.checkpoints",
    ),
    "evaluate": Verb(
        "evaluate RUN [--step N] [key=value ...] [--submit] [--again] [--json]",
        "measure a checkpoint of a run on its evaluation sets, here or, with --submit, by a job; key=value changes fields of "
        "eval, cluster and parallel. The same command again shows the result",
        "slurmtrain.cli.evaluate",
    ),
    "layout": Verb(
        "[+cluster=NAME] [key=value ...] layout [--memory] [--json]",
        "which rank stands where under parallel=... : node, place on every axis, the ranks it shares that axis with; "
        "--memory lays the model out without GPUs: bytes on each pipeline stage's ranks, and what fits if it does not",
        "slurmtrain.cli.layout",
        composes=True,
        options=(("--memory", False), ("--json", False)),
    ),
    "prepare": Verb(
        "prepare prepare.inputs='[FILE|FOLDER|PATTERN, ...]' prepare.output=FOLDER [prepare.tokenizer=FILE] [key=value ...]"
        " | prepare verify FOLDER",
        "raw text (jsonl, parquet, text, a saved Hugging Face data set; .gz, .zst) -> tokenised shards, by all CPUs; stopped, "
        "the same command goes on. As a job: job=prepare ... submit. verify compares every byte with its digest",
        "slurmtrain.cli.prepare",
        composes=True,
    ),
    "progress": Verb(
        "progress STEP [--of STEPS]",
        "for a program of your own, inside of its run: it has got to STEP. status shows it, and a run that gets on is not "
        "given up",
        "slurmtrain.cli.progress",
    ),
    "sandbox": Verb(
        "sandbox up|down|status|env [--nodes N] ...",
        "a throwaway SLURM on this machine, no root",
        "slurmtrain.cli.sandbox",
    ),
    "settle": Verb(
        "settle RUN_DIRECTORY ...", "for the batch script: judge an attempt", "slurmtrain.cli.settle", hidden=True
    ),
    "hook": Verb(
        "hook RUN_DIRECTORY ...",
        "for the batch script: tell the person's command how an attempt has ended",
        "slurmtrain.cli.hook",
        hidden=True,
    ),
    "begin": Verb(
        "begin RUN_DIRECTORY", "for the batch script: is there anything left to do", "slurmtrain.cli.again", hidden=True
    ),
    "again": Verb(
        "again RUN_DIRECTORY ...", "for the batch script: submit the next job", "slurmtrain.cli.again", hidden=True
    ),
}
