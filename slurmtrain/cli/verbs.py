"""The verbs: the effect of each, and the module of its code. Parsing, help and completion all read this list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Flag(NamedTuple):
    """An option of a verb that composes a config; `metavar` is empty where no value follows."""

    name: str
    metavar: str
    help: str


@dataclass(frozen=True)
class Verb:
    """One verb of the command line.

    Attributes:
        module: module with its `main(arguments)` for a verb that composes a config, else with its `main(verb, words)`.
        options: flags of a verb that composes a config -> whether a value follows.
    """

    usage: str
    summary: str
    module: str
    help: str = ""
    composes: bool = False
    hidden: bool = False
    options: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()
    topic: str = ""


VERBS: dict[str, Verb] = {
    "submit": Verb(
        "[-m] [+cluster=NAME] [key=value ...] submit [--dry-run] [--follow] [--after RUN[,RUN]] [--json]"
        " [--array-parallelism N] [--again] [-- PROGRAM WORD ...]",
        "submit a run, a sweep (-m) or a program of your own (--); cluster=local runs it here",
        "slurmtrain.cli.submit",
        "Compose the config, check it, freeze it in a run directory and hand the script to sbatch; then return. With "
        "cluster=local the run trains here, in the foreground. With -m and choices (key=1,2) it is a sweep: all points go "
        "into one array, and the same command again submits only what is missing. Words after -- are a program of your own, "
        "which is run word for word.",
        composes=True,
        options=(
            Flag("--dry-run", "", "print exactly what sbatch would get, and submit nothing"),
            Flag(
                "--follow",
                "",
                "stay, show the output of rank 0 until the run has ended, and exit with 0: finished, 75: stopped, `resume` "
                "continues it, 78: config or environment wrong, or 1",
            ),
            Flag("--after", "RUN[,RUN]", "start when these runs have finished"),
            Flag("--array-parallelism", "N", "with -m: train at most N points at a time"),
            Flag("--again", "", "with -m: make another sweep of the same points"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=a100x4 cluster.nodes=4 submit --dry-run  # read the script first",
            "-m +cluster=a100x4 optim.lr=1e-4,3e-4 submit  # a sweep of two points",
            "+cluster=a100x4 submit -- python my_train.py --lr 1e-3  # your own program",
        ),
        topic="quickstart",
    ),
    "render": Verb(
        "[+cluster=NAME] [key=value ...] render [-o FILE]",
        "print the sbatch script, to read, edit and submit by hand",
        "slurmtrain.cli.submit",
        "Print the script that `submit` would hand to sbatch. With -o it prepares a run directory, too, and writes the script "
        "to FILE: edit it and give it to sbatch yourself.",
        composes=True,
        options=(
            Flag("-o", "FILE", "write the script to FILE and prepare a run for it"),
            Flag("--output", "FILE", "the same"),
        ),
        examples=("+cluster=a100x4 render -o job.sbatch  # then: sbatch job.sbatch",),
        topic="quickstart",
    ),
    "train": Verb(
        "[key=value ...] train [RUN_DIRECTORY]",
        "train on this rank: what srun, torchrun or you by hand start",
        "slurmtrain.cli.train",
        "Train on this rank. The batch script starts it on every rank with a run directory; by hand, python, srun or torchrun "
        "start it with overrides, without a batch job.",
        composes=True,
        examples=(
            "+experiment=smoke train  # one process, a few seconds",
            "+cluster=a100x4 train  # or: torchrun --nproc-per-node 4 -m slurmtrain +cluster=a100x4 train",
        ),
        topic="quickstart",
    ),
    "status": Verb(
        "status [RUN] [-w] [--every SECONDS] [--json]",
        "show all runs, or one attempt by attempt",
        "slurmtrain.cli.status",
        "Show all runs, or one of them attempt by attempt: step, loss, tokens per second, time left, why each attempt ended, "
        "why the job waits and when SLURM expects to start it.",
        examples=(
            "status  # all runs",
            "status last  # your newest run",
            "status --watch  # live, until all have ended",
        ),
        topic="runs",
    ),
    "logs": Verb(
        "logs RUN [-f] [--rank N|all] [--attempt N]",
        "print the output of a rank, or follow it",
        "slurmtrain.cli.logs",
        "Print the output of a rank. With -f follow it through all attempts until the run has ended.",
        examples=(
            "logs last -f  # follow rank 0",
            "logs last --rank all --attempt 1  # every rank of the first attempt",
        ),
        topic="runs",
    ),
    "cancel": Verb(
        "cancel RUN [--json]",
        "end a run for good",
        "slurmtrain.cli.stop",
        "End a run for good. It saves a checkpoint if the grace time allows, and is not requeued.",
        examples=("cancel last",),
        topic="requeue",
    ),
    "preempt": Verb(
        "preempt RUN [--json]",
        "send a run the signal of a preemption, as a drill",
        "slurmtrain.cli.stop",
        "Send a run the signal of a preemption. It saves, leaves, is requeued and resumes; the answer says how long that took.",
        examples=("preempt last",),
        topic="clusters",
    ),
    "requeue": Verb(
        "requeue RUN [KEY=VALUE ...] [--json]",
        "save and start again; start a waiting job now",
        "slurmtrain.cli.stop",
        "Let a run save and start again. A job that waits or is held starts now. KEY=VALUE changes a field of the config for "
        "the next attempt.",
        examples=("requeue last", "requeue last cluster.nodes=2-4 optim.lr=1e-4  # with other values"),
        topic="requeue",
    ),
    "resume": Verb(
        "resume RUN [KEY=VALUE ...] [--code] [--json]",
        "continue a run that has ended",
        "slurmtrain.cli.resume",
        "Continue a run that has ended, from its newest checkpoint, with the config and the code that it was submitted with. "
        "KEY=VALUE changes a field of the config, unless that would change what its checkpoints mean.",
        examples=(
            "resume last",
            "resume last cluster.nodes=2 train.steps=+100  # on two nodes, and for 100 more steps",
            "resume last optim.lr=1e-4 --code  # another value, and the code as it is now",
        ),
        topic="requeue",
    ),
    "runs": Verb(
        "runs list | compare A B | prune [--older-than DAYS] [--state STATE ...] [--dry-run] ...",
        "list runs, compare two, remove those that have ended",
        "slurmtrain.cli.runs.main",
        "List runs; show what differs between two of them, and from which step on; remove those that have ended.",
        examples=("runs list --size", "runs compare A B", "runs prune --older-than 30 --dry-run  # say what would go"),
        topic="runs",
    ),
    "sweep": Verb(
        "sweep list | status SWEEP [-w] | collect SWEEP [-o FILE] [--plot FILE] | retry SWEEP | cancel SWEEP [--json]",
        "show the points of a sweep, collect their metrics, retry or cancel them",
        "slurmtrain.cli.sweep",
        "Show the points of a sweep, collect their metrics as a table or a picture, submit again what failed, or cancel all.",
        examples=(
            "sweep status last --watch",
            "sweep collect last -o table.csv",
            "sweep retry last  # what failed, once more",
        ),
        topic="sweeps",
    ),
    "checkpoints": Verb(
        "checkpoints RUN [list | verify [STEP] | prune [--dry-run] ... | export OUT ...]",
        "list, verify, prune or export the checkpoints of a run",
        "slurmtrain.cli.checkpoints.main",
        "List what a run can be resumed from, compare every file with its digest, remove what need not be kept, or export the "
        "weights. RUN may also be a directory of checkpoints, or one checkpoint.",
        examples=(
            "checkpoints last",
            "checkpoints last verify",
            "checkpoints last export model.safetensors --dtype bfloat16",
        ),
        topic="checkpoints",
    ),
    "evaluate": Verb(
        "evaluate RUN [--step N] [key=value ...] [--submit] [--again] [--json]",
        "measure a checkpoint of a run on its evaluation sets",
        "slurmtrain.cli.evaluate",
        "Measure a checkpoint of a run on its evaluation sets, here or, with --submit, in a job. key=value changes fields of "
        "eval, cluster and parallel. The same command again shows the result that it has.",
        examples=("evaluate last --step 1000", "evaluate last --submit eval.cluster.time_limit_min=30  # as a job"),
        topic="evaluation",
    ),
    "layout": Verb(
        "[+cluster=NAME] [key=value ...] layout [--memory] [--json]",
        "show which rank stands where under parallel=..., and what memory it needs",
        "slurmtrain.cli.layout",
        "Show which rank stands where under parallel=...: its node, its place on every axis, and the ranks that it shares an "
        "axis with.",
        composes=True,
        options=(
            Flag("--memory", "", "lay the model out, without GPUs, and count the bytes on each pipeline stage's ranks"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=a100x8 cluster.nodes=8 model=llama3_8b parallel.tp=4 parallel.pp=2 layout",
            "+cluster=h100x8 model=llama3_8b parallel=fsdp layout --memory",
        ),
        topic="parallelism",
    ),
    "prepare": Verb(
        "prepare prepare.inputs='[FILE|FOLDER|PATTERN, ...]' prepare.output=FOLDER [prepare.tokenizer=FILE] [key=value ...]"
        " | prepare verify FOLDER",
        "turn raw text into tokenised shards; verify them",
        "slurmtrain.cli.prepare",
        "Turn raw text (jsonl, parquet, text, a saved Hugging Face data set; also .gz and .zst) into tokenised shards, on all "
        "CPUs of this machine. When it was stopped, the same command goes on. As a job: job=prepare ... submit. verify "
        "compares every byte with its digest.",
        composes=True,
        examples=(
            "prepare prepare.inputs=raw.jsonl prepare.output=tokens  # every byte is a token",
            "prepare prepare.inputs='[/data/raw/*.jsonl.zst]' prepare.output=/data/tokens prepare.tokenizer=tokenizer.json",
            "prepare verify /data/tokens",
        ),
        topic="data",
    ),
    "progress": Verb(
        "progress STEP [--of STEPS]",
        "say how far a program of your own has got, from inside of its run",
        "slurmtrain.cli.progress",
        "Say, from inside of a run, that your own program has got to STEP. status shows it, and a run that gets on is not "
        "given up.",
        examples=("progress 500 --of 10000",),
        topic="own-scripts",
    ),
    "nodes": Verb(
        "nodes list | blame NODE [--reason TEXT] | forgive NODE|--all [--cluster NAME] [--json]",
        "show which nodes your runs leave out, and why; blame or forgive one",
        "slurmtrain.cli.nodes",
        "Show what has gone wrong on which node, by the ledger that your jobs on this cluster keep, and which nodes your next "
        "starts leave out. Blame a node, or forgive it, by hand.",
        examples=(
            "nodes list",
            "nodes blame n3 --reason 'its disk is full'",
            "nodes forgive --all",
        ),
        topic="requeue",
    ),
    "sandbox": Verb(
        "sandbox up|down|status|env [--nodes N] ...",
        "start a real, throwaway SLURM on this machine, without root",
        "slurmtrain.cli.sandbox",
        "Start a real, throwaway SLURM on this machine, ask for its state, or end it. It needs no root.",
        examples=(
            "sandbox up --nodes 4 --cpus 4",
            "+cluster=sandbox submit --follow",
            "sandbox down",
        ),
        topic="clusters",
    ),
    "help": Verb(
        "help [TOPIC]",
        "show a page of the manual; without TOPIC the list of topics",
        "slurmtrain.cli.manual",
        "Show a page of the manual, on a terminal in a pager; without TOPIC list the topics.",
        examples=("help requeue", "help troubleshooting | less"),
    ),
    "finish-attempt": Verb(
        "finish-attempt RUN_DIRECTORY ...",
        "for the batch script: record how an attempt has ended, and say what comes next",
        "slurmtrain.cli.batch.finish_attempt",
        hidden=True,
    ),
    "hook": Verb(
        "hook RUN_DIRECTORY ...",
        "for the batch script: tell the person's command how an attempt has ended",
        "slurmtrain.cli.batch.hook",
        hidden=True,
    ),
    "begin-attempt": Verb(
        "begin-attempt RUN_DIRECTORY",
        "for the batch script: is there anything left to do",
        "slurmtrain.cli.batch.begin_attempt",
        hidden=True,
    ),
    "resubmit": Verb(
        "resubmit RUN_DIRECTORY ...",
        "for the batch script: submit the next job",
        "slurmtrain.cli.batch.resubmit",
        hidden=True,
    ),
}
# The batch scripts of runs that earlier versions have submitted call them by these names.
VERBS |= {"settle": VERBS["finish-attempt"], "begin": VERBS["begin-attempt"], "again": VERBS["resubmit"]}
