"""The verbs: what each does, its options, and the function that runs it.

`arguments` makes the parsers from this table; help and tab completion read it, too. To give a verb an option,
declare it here; its function finds the value in the namespace that it gets. Nothing heavy is imported, since every command
line, and every press of the Tab key, reads the table.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from slurmtrain.choices import Target
from slurmtrain.cli.units import moment, number, rank_or_all, token_count, whole

HIDDEN = argparse.SUPPRESS
COUNT = partial(whole, least=1)


class Argument(NamedTuple):
    """An argument of `ArgumentParser.add_argument`.

    Tab completion offers runs where `metavar` holds RUN, and sweeps where it holds SWEEP.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]


def option(spec: str, help: str, type: Callable[[str], Any] = str, **settings: Any) -> Argument:
    """Return the argument that `spec` shows as the help does.

    "-f, --follow" takes no value, "--step N" takes one, and "--by run|user" one of these. "RUN" is a positional word,
    "[RUN]" one that may be absent, and "RUN ..." stands for one or more.
    """
    if settings.get("default") not in (None, "", HIDDEN):
        help += f" (default: {settings['default']:{'g' if isinstance(settings['default'], float) else ''}})"
    if not spec.startswith("-"):
        word = spec.strip("[]. ")
        nargs = "?" if spec.startswith("[") else "+" if spec.endswith("...") else None
        name = settings.pop("dest", word.lower())
        return Argument((name,), {"metavar": word, "type": type, "nargs": nargs, "help": help, **settings})
    *others, last = spec.split(", ")
    last, _, value = last.partition(" ")
    how: dict[str, Any] = {"metavar": value, "type": type} if value else {"action": "store_true"}
    if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", value):
        how = {"choices": value.split("|")}
    return Argument((*others, last), {**how, "help": help, **settings})


class Verb(NamedTuple):
    """One verb of the command line, or one action of a verb, such as `runs compare`.

    Attributes:
        help: what it does; the first sentence is its summary.
        composes: its words are those of a config, and Hydra's options.
        changes: what KEY=VALUE among its words does; "": it takes none.
        runs_program: the words after -- are a program.
        topic: the page of the manual that explains it; `--help` shows the command lines there that have this verb.
        default_action: of a verb without one of its actions; None: it needs one.
        function: "module.function" of this package, which gets the namespace and returns the exit code; "": `main` of the
            module that is called like the verb.
    """

    help: str
    arguments: Sequence[Argument] = ()
    topic: str = ""
    composes: bool = False
    changes: str = ""
    runs_program: bool = False
    hidden: bool = False
    actions: Mapping[str, Verb] = {}
    default_action: str | None = None
    function: str = ""

    @property
    def summary(self) -> str:
        text = self.help.partition(". ")[0].rstrip(".")
        return f"{text[:1].lower()}{text[1:]}"

    @property
    def options(self) -> dict[str, Argument]:
        """The options by name, with Hydra's where it composes a config."""
        every = [*self.arguments, *(HYDRA if self.composes else ())]
        return {name: each for each in every for name in each.names if name.startswith("-")}

    def with_action(self, action: str) -> Verb:
        """Return one of its actions as a verb: with the arguments of both."""
        its = self.actions[action]
        return its._replace(arguments=[*self.arguments, *its.arguments], topic=self.topic)


WAYS = ("early_signal", "requeue", "crash", "in_place", "preemption")
STATES = (
    *("prepared", "waiting", "starting", "running", "suspended", "stopping", "requeued", "held", "unknown"),
    *("finished", "stopped", "pruned", "failed", "lost", "unreadable"),
)
_RUN = "a run ID, a unique prefix of one, a path, or last"
RUN, OPTIONAL_RUN, RUN_OR_SWEEP = option("RUN", _RUN), option("[RUN]", _RUN), f"{_RUN}; or a sweep"
SWEEP = option("SWEEP", "the name of a sweep, a part of it, a path, or last")
JSON = option("--json", "print the answer as JSON, for a program")
DRY_RUN = option("--dry-run", "only show what would be removed")
SINCE = option("--since TIME", "only from this time on: 90m, 12h, 7d, 4w ago, or a day: 2026-01-31", moment)
STEP = option("--step N", "the step of the checkpoint (default: the newest)", int)
CLUSTER = option("--cluster NAME", "SLURM's name of the cluster; default: the one of this shell")
MODE = option("--mode min|max", "whether lower or higher values are better (default: min for a loss)")
SANDBOX = option("--name NAME", "name, to run several at the same time", default="default")
# Options of every verb that composes a config, and of a command line without a verb: they are called as in Hydra.
HYDRA = (
    option("--cfg, -c job", "print the composed config, and do nothing else", choices=["job"]),
    option("--config-dir, -cd DIR", "also look for configs in DIR; first, if it has the primary config"),
    option("--config-name, -cn NAME", "another primary config", default="config"),
    option("--shell-completion, -sc", HIDDEN),
    option("--multirun, -m", "make a sweep of choices such as key=1,2; submit only"),
)
# A command line without a verb.
NO_VERB = Verb(
    "",
    arguments=(option("--help, -h", "show this help and exit"), option("--version", "print the version and exit")),
    composes=True,
)

VERBS: dict[str, Verb] = {
    "submit": Verb(
        "Submit a run, a sweep (-m) or your own program (--); cluster=local runs it here. With -m and choices "
        "(key=1,2) all points go into one array, and the same command again submits only what is missing.",
        (
            option("--dry-run", "print exactly what sbatch would get, and submit nothing"),
            option("--follow", "show rank 0 until the run has ended; exit code 0, or 75: stopped, 78: config, 1: else"),
            option("--after RUN[,RUN]", "start when these runs have finished"),
            option("--from RUN", "take the config and code of this run; key=value changes its config", dest="origin"),
            option("--array-parallelism N", "with -m: train at most N points at a time", COUNT),
            option("--again", "with -m: submit another sweep of the same points"),
            JSON,
        ),
        "quickstart",
        composes=True,
        runs_program=True,
    ),
    "render": Verb(
        "Print the sbatch script, to read, edit and submit by hand; --explain explains each line. With -o, also "
        "prepare a run directory and write the script to FILE: edit it and give it to sbatch yourself. With --target, it is "
        "the manifest of another engine instead.",
        (
            option("--explain", "explain each line: the config field or SLURM requirement that it comes from"),
            option("--json", "with --explain: print a list of {line, why}, for a program"),
            option("-o, --output FILE", "write the script to FILE and prepare a run for it"),
            option(
                f"--target {'|'.join(Target)}",
                "print the manifest by which Kubernetes, Ray or SkyPilot runs the same job",
            ),
        ),
        "quickstart",
        composes=True,
        runs_program=True,
    ),
    "train": Verb(
        "Train on this rank; started by srun, torchrun, or by hand.",
        (option("[DIRECTORY]", "train this run, with its own config", dest="run_directory"),),
        "quickstart",
        composes=True,
        runs_program=True,
        function="in_job.train",
    ),
    "status": Verb(
        "Show all runs, newest first, or one attempt by attempt.",
        (
            option("[RUN|SWEEP]", RUN_OR_SWEEP, dest="run"),
            option("--limit N", "show the newest N; default: as many as fit on the terminal", COUNT),
            option("--name NAME", "only runs and sweeps of this name; it may hold a *"),
            option("--state STATE", "only runs in this state, and sweeps with one", choices=STATES),
            SINCE,
            JSON,
        ),
        "runs",
    ),
    "usage": Verb(
        "Show where the GPU hours went: productive, start-up, redone, hung, lost and why.",
        (
            option("[RUN|SWEEP]", "a run or a sweep; default: all runs here", dest="name"),
            SINCE,
            option("--by run|user", "what a row is; default: user, or run if you name a run or sweep"),
            JSON,
        ),
        "usage",
    ),
    "logs": Verb(
        "Print the output of a rank, or follow it.",
        (
            RUN,
            option("-f, --follow", "follow it through all attempts until the run has ended"),
            option("--rank N|all", "all prints each line with its rank", rank_or_all, default=0),
            option("--attempt N", "default: the latest", COUNT),
        ),
        "runs",
    ),
    "cancel": Verb(
        "End a run for good. It saves a checkpoint if the grace time allows, and is not requeued.",
        (RUN, JSON),
        "quickstart",
        function="stop.main",
    ),
    "preempt": Verb(
        "Send a run the signal of a preemption, to test what happens.",
        (RUN, JSON),
        "clusters",
        function="stop.main",
    ),
    "requeue": Verb(
        "Save and start again, with the same config; start a waiting or held job now.",
        (RUN, JSON),
        "quickstart",
        function="stop.main",
    ),
    "drill": Verb(
        "Interrupt tiny jobs, or your own run, in every possible way, and check that they resume with the same bits. "
        "Without RUN, and with words of cluster and requeue only, test the site with tiny jobs. With RUN, other words "
        "of a config, or a program after --, take its config and code for a few steps, in scratch directories. Exit "
        "code 0: everything that could be tried has passed, 1: something has failed, 75: nothing was judged.",
        (
            OPTIONAL_RUN,
            option("--ways WAY,...", f"of {', '.join(WAYS)}; default: all for the site, else early_signal"),
            option("--leaving SECONDS", "let a training take this long to stop, as yours might", number, default=0.0),
            option("--steps N", "number of steps to train", partial(whole, least=2), default=16),
            option("--stop-at N", "interrupt it after this step; default: half of --steps", COUNT),
            option(
                "--within MIN",
                "end everything after this time, queue included",
                partial(number, least=0.1),
                default=30.0,
            ),
            JSON,
        ),
        "drill",
        composes=True,
        runs_program=True,
    ),
    "resume": Verb(
        "Continue a run that has ended. From its newest checkpoint, with the config and code that it was submitted "
        "with. KEY=VALUE changes a field of the config, unless that would invalidate its checkpoints.",
        (RUN, option("--code", "take a new snapshot: continue with the current code"), JSON),
        "quickstart",
        changes="continue with this value of a config field; train.steps=+N means N more steps",
        function="stop.resume",
    ),
    "runs": Verb(
        "Compare two runs, remove ended ones; status lists them.",
        topic="runs",
        actions={
            "compare": Verb(
                "Show what differs between two runs: config, code, what they ran with, samples and metrics.",
                (
                    option("RUN_A", _RUN, dest="a"),
                    option("RUN_B", _RUN, dest="b"),
                    option("--tolerance R", "relative difference that counts as equal", number, default=0.0),
                    JSON,
                ),
            ),
            "prune": Verb(
                "Remove runs that have ended. With their checkpoints. A run always stays if it is alive, waits, cannot "
                "be asked about or is being read, or if another run begins from its checkpoints.",
                (
                    option("--older-than DAYS", "only runs that have not changed for this long", number),
                    option("--state finished|stopped|pruned|failed|lost", "only these", nargs="+"),
                    DRY_RUN,
                ),
            ),
        },
    ),
    "report": Verb(
        "Show a run or a sweep as one HTML page: curves, attempts, goodput, config. It needs no network.",
        (
            option("RUN|SWEEP", RUN_OR_SWEEP, dest="what"),
            option("--out FILE", "the page (default: report-NAME.html in the run's directory); - for standard output"),
            option("--metric NAME", "for a sweep: compare the points by the best value of this metric"),
            MODE,
            option("--serve", "show the page on this machine, refreshed, until Ctrl-C"),
            option("--port PORT", "port for --serve (default: any free port)", whole),
            JSON,
        ),
        "runs",
    ),
    "sweep": Verb(
        "Show the points of a sweep, collect their metrics, retry or cancel them.",
        topic="sweeps",
        actions={
            "status": Verb("Show every point: what varies, its state, step and loss.", arguments=(SWEEP, JSON)),
            "collect": Verb(
                "Print a table of all points with their metrics.",
                arguments=(
                    SWEEP,
                    option("-o, --output FILE", "write FILE.csv or FILE.json instead of printing"),
                    option("--format csv|json", "default: by FILE's suffix, or a table"),
                    option("--json", "the same as --format json", action="store_const", dest="format", const="json"),
                    option("--metric NAME", "compare its best values (default: checkpoint.best_metric, else loss)"),
                    MODE,
                ),
            ),
            "retry": Verb(
                "Submit again what failed, was stopped or lost, and what has not been submitted yet.",
                arguments=(SWEEP, JSON),
            ),
            "cancel": Verb("Cancel all points that have not ended.", arguments=(SWEEP, JSON)),
        },
    ),
    "checkpoints": Verb(
        "List, verify, prune or export the checkpoints of a run. RUN may also be a directory of "
        "checkpoints, or one checkpoint.",
        (option("RUN", f"{_RUN}; or the path of a directory of checkpoints, or of a checkpoint"), JSON),
        "checkpoints",
        default_action="list",
        actions={
            "list": Verb("Print a table of the checkpoints; checks sizes only (default)."),
            "verify": Verb(
                "Compare every file with its digest. Exit code 1 when anything is damaged.",
                (option("[STEP]", "verify only this checkpoint", int),),
            ),
            "prune": Verb(
                "Remove checkpoints that need not be kept. The newest is verified first. The newest two always stay, "
                "the newest from before numbers broke, and what somebody reads. Without --keep-last: by the run's own "
                "checkpoint.keep_* (no run: the last 2). What killed saves have left goes after an hour.",
                (
                    option("--keep-last N", "keep the newest N, at least 2", partial(whole, least=2)),
                    option("--damaged", "instead, or with --keep-last, remove those that a restore has set aside"),
                    DRY_RUN,
                ),
            ),
            "export": Verb(
                "Export the weights for other programs: a Hugging Face folder, or a file.",
                (
                    option("OUT", "FILE.safetensors, or a folder for --format hf and peft"),
                    option("--format hf|peft", "a folder of the model, or of its adapters alone; default: a file"),
                    STEP,
                    option("--only NAME", "the object that was saved as NAME", default="model"),
                    option("--dtype float32|float16|bfloat16|float64", "convert floating-point tensors"),
                ),
            ),
        },
    ),
    "evaluate": Verb(
        "Evaluate a checkpoint of a run on its evaluation sets. Here or, with --submit, in a job. KEY=VALUE changes "
        "fields of eval, cluster and parallel. Repeating the command shows the existing result.",
        (
            RUN,
            STEP,
            option("--submit", "submit it as a job, with the changes in eval.cluster"),
            option("--due", HIDDEN),
            option("--again", "evaluate again although there is a result, for instance because the data changed"),
            JSON,
        ),
        "evaluation",
        changes="change a field of eval, cluster or parallel",
        function="other_jobs.evaluate",
    ),
    "plan": Verb(
        "Compute memory, time, checkpoints and cost of a run; say whether more nodes help. By arithmetic, without GPUs.",
        (
            option("--tokens N", "cost of N tokens (15T, 300B, 1.5e12), not train.steps", token_count),
            JSON,
        ),
        "planning",
        composes=True,
    ),
    "preflight": Verb(
        "Check the nodes of an allocation like the config's, without training.",
        (option("--full", "also measure GPUs, collectives and pairs of nodes; takes about a minute"), JSON),
        "preflight",
        composes=True,
        function="other_jobs.preflight",
    ),
    "prepare": Verb(
        "Turn raw text into tokenised shards; verify them. As a job: job=prepare ... submit.",
        (),
        "data",
        composes=True,
        actions={
            "verify": Verb("Check a data set that was prepared before.", arguments=(option("FOLDER", "the data set"),))
        },
        default_action="",
        function="in_job.prepare",
    ),
    "progress": Verb(
        "Report the progress of your own program, from inside its run.",
        (
            option("STEP", "the step that it has reached, a whole number that grows", whole),
            option("--of STEPS", "the last step; status then shows the time left", whole),
        ),
        "own-scripts",
        function="in_job.progress",
    ),
    "nodes": Verb(
        "Show which nodes your runs exclude, and why; blame or forgive one. A record counts for 24 hours.",
        topic="requeue",
        actions={
            "list": Verb("List incidents, and which nodes are excluded.", arguments=(CLUSTER, JSON)),
            "blame": Verb(
                "Exclude a node from the next starts of your runs. Jobs that run or wait already are not changed.",
                (
                    option("NODE", "SLURM's name of the node"),
                    option("--reason TEXT", "why, for `nodes list` and `status`", default=""),
                    CLUSTER,
                    JSON,
                ),
            ),
            "forgive": Verb(
                "Use a node again. What was recorded of it until now does not count any more.",
                (
                    option("[NODE]", "SLURM's name of the node"),
                    option("--all", "all nodes of the cluster"),
                    CLUSTER,
                    JSON,
                ),
            ),
        },
    ),
    "probe": Verb(
        "Write conf/cluster/NAME.yaml from what SLURM reports.",
        (
            option("--partition NAME", "the partition to describe (default: the cluster's default)"),
            option("--account NAME", "the account of the jobs (default: your default account)"),
            option("--qos NAME", "the QOS of the jobs (default: your default QOS)"),
            option("--out FILE", "the file to write (default: conf/cluster/CLUSTER.yaml here); - for standard output"),
            option("--force", "replace an existing file"),
            JSON,
        ),
        "clusters",
    ),
    "sandbox": Verb(
        "Start a real, throwaway SLURM on this machine, without root.",
        topic="clusters",
        actions={
            "up": Verb(
                "Start one; returns when all nodes are idle.",
                arguments=(
                    SANDBOX,
                    option("--nodes N", "number of nodes", whole, default=4),
                    option("--cpus N", "CPUs per node, not necessarily there", whole, default=4),
                    option("--gpus N", "GPUs per node, for SLURM's eyes only", whole, default=0),
                    option("--preempt-mode requeue|cancel|suspend", "for jobs in partition low", default="requeue"),
                ),
            ),
            "down": Verb("End it: its jobs, its daemons, its directory.", arguments=(SANDBOX,)),
            "status": Verb("Say whether it runs, and in which state its nodes are.", arguments=(SANDBOX, JSON)),
            "env": Verb("Print the line that points SLURM's commands at it.", arguments=(SANDBOX,)),
        },
    ),
    "help": Verb(
        "Show a page of the manual, on a terminal in a pager; without TOPIC the list of topics.",
        (option("[TOPIC]", "a page of the manual, or a verb"),),
    ),
    "supervise": Verb(
        "For the batch script: start the ranks of a run, attempt after attempt, and decide how it goes on.",
        arguments=(
            option("DIRECTORY ...", "a run, or several that share the job", dest="run_dir"),
            option("--environment FD", "where the environment of the submission is read", int),
            option("--set-up-failed WHY", "no rank can be started: record that, and end the attempt"),
            option("--hook ATTEMPT", "run the hook for the end of an attempt", int),
            option("--watch NODE", "from another node, watch whether the job still has this one"),
            option("--job JOB", "with --watch: the job", default=""),
        ),
        hidden=True,
        function="in_job.supervise",
    ),
}

# Options with a value: the word after one of these is no verb.
WITH_VALUE = {
    name
    for verb in (NO_VERB, *VERBS.values())
    for each in (verb, *verb.actions.values())
    for name, option in each.options.items()
    if "action" not in option.settings
}
