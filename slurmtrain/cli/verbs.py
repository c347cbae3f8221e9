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
        " [--from BUNDLE]"
        " [--array-parallelism N] [--again] [-- PROGRAM WORD ...]",
        "submit a run, a sweep (-m) or your own program (--); cluster=local runs it here",
        "slurmtrain.cli.submit",
        "Compose the config, check it, freeze it in a run directory and hand the script to sbatch, then return. With "
        "cluster=local the run trains here, in the foreground. With -m and choices (key=1,2) it is a sweep: all points go "
        "into one array, and the same command again submits only what is missing. The words after -- are your own program, "
        "run word for word.",
        composes=True,
        options=(
            Flag("--dry-run", "", "print exactly what sbatch would get, and submit nothing"),
            Flag(
                "--follow",
                "",
                "show the output of rank 0 until the run has ended. Exit code 0: finished, 75: stopped, `resume` "
                "continues it, 78: config or environment wrong, 1: otherwise",
            ),
            Flag("--after", "RUN[,RUN]", "start when these runs have finished"),
            Flag(
                "--from",
                "BUNDLE",
                "run a file that `runs bundle` packed, with its config and code; key=value changes fields",
            ),
            Flag("--array-parallelism", "N", "with -m: train at most N points at a time"),
            Flag("--again", "", "with -m: submit another sweep of the same points"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=a100x4 cluster.nodes=4 submit --dry-run  # read the script first",
            "-m +cluster=a100x4 optim.lr=1e-4,3e-4 submit  # a sweep of two points",
            "+cluster=a100x4 submit -- python my_train.py --lr 1e-3  # your own program",
            "+cluster=a100x4 submit --from my-run.tar.gz  # somebody else's run, on this cluster",
            "+cluster=a100x4 job.launcher=torchrun submit -- my_train.py  # with torchrun on each node",
        ),
        topic="quickstart",
    ),
    "render": Verb(
        "[+cluster=NAME] [key=value ...] render [--explain [--json]] [-o FILE]",
        "print the sbatch script, to read, edit and submit by hand; --explain explains each line",
        "slurmtrain.cli.submit",
        "Print the script that `submit` would hand to sbatch. With -o, also prepare a run directory and write the script "
        "to FILE: edit it and give it to sbatch yourself.",
        composes=True,
        options=(
            Flag("--explain", "", "explain each line: the config field or SLURM requirement that it comes from"),
            Flag("--json", "", "with --explain: print a list of {line, why}, for a program"),
            Flag("-o", "FILE", "write the script to FILE and prepare a run for it"),
            Flag("--output", "FILE", "the same"),
        ),
        examples=(
            "+cluster=a100x4 render -o job.sbatch  # then: sbatch job.sbatch",
            "+cluster=a100x4 render --explain  # explain each line",
        ),
        topic="quickstart",
    ),
    "train": Verb(
        "[key=value ...] train [RUN_DIRECTORY [--standby]]",
        "train on this rank; started by srun, torchrun, or by hand",
        "slurmtrain.cli.train",
        "Train on this rank. The supervisor starts this verb on every rank, with a run directory. You can also start it with "
        "python, srun or torchrun, with overrides and without a batch job.",
        composes=True,
        options=(
            Flag(
                "--standby",
                "",
                "for the supervisor: load PyTorch, then wait for the number of the attempt on standard input",
            ),
        ),
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
    "usage": Verb(
        "usage [RUN|SWEEP] [--since TIME] [--by user|run|node] [--json]",
        "show where the GPU hours went: productive, start-up, redone, hung, lost and why",
        "slurmtrain.cli.usage",
        "Show how runs spent their time, over all attempts, and the GPU hours that were lost, by cause. Without a "
        "name, show all runs, with one row per person. It reads run directories, and SLURM's accounting if there is one.",
        examples=(
            "usage  # everybody's runs here, one row per person",
            "usage last  # your newest run",
            "usage --since 7d --by run  # the last seven days, run by run",
            "usage --by node  # which nodes cost most",
        ),
        topic="usage",
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
        "send a run the signal of a preemption, to test what happens",
        "slurmtrain.cli.stop",
        "Send a run the signal of a preemption. It saves, exits, is requeued and resumes; the output says how long that took.",
        examples=("preempt last",),
        topic="clusters",
    ),
    "requeue": Verb(
        "requeue RUN [KEY=VALUE ...] [--json]",
        "save and start again; start a waiting job now",
        "slurmtrain.cli.stop",
        "Make a run save and start again. A waiting or held job starts now. KEY=VALUE changes a field of the config for "
        "the next attempt.",
        examples=("requeue last", "requeue last cluster.nodes=2-4 optim.lr=1e-4  # with other values"),
        topic="requeue",
    ),
    "drill": Verb(
        "[+cluster=NAME] [key=value ...] drill [RUN] [--ways WAY,...] [--leaving SECONDS] [--steps N] [--stop-at N]"
        " [--stop-after SECONDS] [--tolerance X] [--within MIN] [--keep] [--json] [-- PROGRAM WORD ...]",
        "interrupt tiny jobs, or your own run, in every possible way, and check that they resume with the same bits",
        "slurmtrain.cli.drill",
        "Without RUN, and with words of cluster and requeue only, test the site: submit a tiny job for each way at once, let "
        "them be warned, requeued, killed and preempted, and report for each whether it was told, saved, came back and ended "
        "with the bits of an uninterrupted one; if not, what to set. With RUN, other words of a config, or a program after "
        "--, train it twice for a few steps in scratch directories, once stopped and resumed, and compare the two. All its "
        "jobs end with it. Exit code 0: everything that could be tried has passed, 1: something has failed, 75: nothing was "
        "judged.",
        composes=True,
        options=(
            Flag("--ways", "WAY,...", "of early_signal, requeue, crash, in_place and preemption; default: all"),
            Flag("--leaving", "SECONDS", "let the tiny jobs take this long to save, as yours might"),
            Flag("--steps", "N", "for your own run: number of steps to train; default: 20"),
            Flag("--stop-at", "N", "for your own run: stop after this step; default: half of --steps"),
            Flag(
                "--stop-after",
                "SECONDS",
                "stop a program that reports no steps this long after its start; default: 30",
            ),
            Flag("--tolerance", "X", "relative difference up to which values count as equal; default: 1e-6"),
            Flag(
                "--within",
                "MIN",
                "minutes, including the time in the queue, after which to end everything; default: 30",
            ),
            Flag("--keep", "", "keep the folder of its runs even if everything has passed"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=a100x8 drill  # can this site interrupt and resume a job?",
            "+cluster=a100x8 drill --ways preemption --leaving 60  # would a job that saves for a minute survive it?",
            "drill last --steps 20  # does my run resume with the same bits?",
            "+cluster=a100x8 drill -- python my_train.py --steps 100  # and my own program?",
        ),
        topic="drill",
    ),
    "resume": Verb(
        "resume RUN [KEY=VALUE ...] [--code] [--json]",
        "continue a run that has ended",
        "slurmtrain.cli.resume",
        "Continue a run that has ended, from its newest checkpoint, with the config and code that it was submitted with. "
        "KEY=VALUE changes a field of the config, unless that would invalidate its checkpoints.",
        examples=(
            "resume last",
            "resume last cluster.nodes=2 train.steps=+100  # on two nodes, and for 100 more steps",
            "resume last optim.lr=1e-4 --code  # another value, and the current code",
        ),
        topic="requeue",
    ),
    "runs": Verb(
        "runs list | compare A B | bundle RUN [FILE] | prune [--older-than DAYS] [--state STATE ...] [--dry-run] ...",
        "list runs, compare two, pack one to run elsewhere, remove ended ones",
        "slurmtrain.cli.runs.main",
        "List runs; show what differs between two of them, and from which step on; pack one into a file to run it elsewhere; "
        "remove those that have ended.",
        examples=(
            "runs list --size",
            "runs compare A B",
            "runs bundle last my-run.tar.gz  # then, anywhere: submit --from my-run.tar.gz",
            "runs prune --older-than 30 --dry-run  # show what it would remove",
        ),
        topic="runs",
    ),
    "report": Verb(
        "report RUN|SWEEP [--out FILE] [--png FOLDER] [--tables FOLDER] [--serve] [--port PORT] [--json]",
        "show a run or a sweep as one HTML page: curves, attempts, goodput, config",
        "slurmtrain.cli.report",
        "Write one HTML page that needs no network: loss and evaluation curves, throughput, the phases of a step, the timeline "
        "of attempts, goodput, conspicuous nodes, config and environment; for a sweep, its points, parallel "
        "coordinates and curves. With --serve, show it on this machine, refreshed while the run continues.",
        examples=(
            "report last  # report-RUN.html, to open in a browser or send to somebody",
            "report last --png pictures --tables tables",
            "report last --serve  # live; prints its URL",
        ),
        topic="runs",
    ),
    "sweep": Verb(
        "sweep list | status SWEEP [-w] | collect SWEEP [-o FILE] [--plot FILE] | retry SWEEP | cancel SWEEP [--json]",
        "show the points of a sweep, collect their metrics, retry or cancel them",
        "slurmtrain.cli.sweep",
        "Show the points of a sweep, collect their metrics as a table or picture, submit failed points again, or cancel all.",
        examples=(
            "sweep status last --watch",
            "sweep collect last -o table.csv",
            "sweep retry last  # submit failed points again",
        ),
        topic="sweeps",
    ),
    "checkpoints": Verb(
        "checkpoints RUN [list | verify [STEP] | prune [--dry-run] ... | export OUT ... | import SOURCE]",
        "list, verify, prune or export the checkpoints of a run; import weights",
        "slurmtrain.cli.checkpoints.main",
        "List the checkpoints of a run, compare every file with its digest, remove checkpoints that need not be kept, export "
        "the weights, or import weights from another program. RUN may also be a directory of checkpoints, or one checkpoint; "
        "for import, it is the folder to create.",
        examples=(
            "checkpoints last",
            "checkpoints last verify",
            "checkpoints last export my_model --format hf --dtype bfloat16  # for transformers, vLLM, ...",
            "checkpoints last export model.safetensors",
            "checkpoints /data/start import /data/weights.pt  # for checkpoint.restore_from",
        ),
        topic="checkpoints",
    ),
    "evaluate": Verb(
        "evaluate RUN [--step N] [key=value ...] [--submit] [--again] [--json]",
        "evaluate a checkpoint of a run on its evaluation sets",
        "slurmtrain.cli.evaluate",
        "Evaluate a checkpoint of a run on its evaluation sets, here or, with --submit, in a job. key=value changes fields of "
        "eval, cluster and parallel. Repeating the command shows the existing result.",
        examples=("evaluate last --step 1000", "evaluate last --submit eval.cluster.time_limit_min=30  # as a job"),
        topic="evaluation",
    ),
    "layout": Verb(
        "[+cluster=NAME] [key=value ...] layout [--memory] [--json]",
        "show the position of every rank under parallel=..., and how much memory it needs",
        "slurmtrain.cli.layout",
        "Show the position of every rank under parallel=...: its node, its index on every axis, and the ranks that it shares "
        "an axis with.",
        composes=True,
        options=(
            Flag(
                "--memory",
                "",
                "build the sharded model without GPUs, and count the bytes on the ranks of each pipeline stage",
            ),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=a100x8 cluster.nodes=8 model=llama3_8b parallel.tp=4 parallel.pp=2 layout",
            "+cluster=h100x8 model=llama3_8b parallel=fsdp layout --memory",
        ),
        topic="parallelism",
    ),
    "plan": Verb(
        "[+cluster=NAME] [key=value ...] plan [--search] [--tokens N] [--from RUN] [--json]",
        "compute memory, time, checkpoints and cost of a run; say whether more nodes help",
        "slurmtrain.cli.plan.main",
        "Compute, without GPUs and before anything is submitted: bytes per GPU, communication per axis and step, time per "
        "step, MFU, how often to save, goodput, GPU hours, and how many nodes are worth using.",
        composes=True,
        options=(
            Flag("--search", "", "rank the layouts that fit, the fastest first"),
            Flag("--tokens", "N", "compute the cost of N tokens (15T, 300B, 1.5e12) instead of train.steps"),
            Flag("--from", "RUN", "use rates measured by a run on this cluster instead of data sheets"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=h100x8 cluster.nodes=16 model=llama3_8b parallel=fsdp train.global_batch_size=1024 plan",
            "+cluster=h100x8 cluster.nodes=16 model=qwen2_5_72b train.global_batch_size=512 plan --search",
            "+cluster=a100x8 model=llama3_1b parallel=fsdp plan --tokens 300B --from last",
        ),
        topic="planning",
    ),
    "scale": Verb(
        "[+cluster=NAME] [key=value ...] scale [--nodes 1,2,4] [--strong] [--steps N] [--plot FILE] [--no-wait] [--json]",
        "train a few steps on 1, 2, 4, ... nodes: efficiency of each doubling, and the bottleneck",
        "slurmtrain.cli.scale",
        "Submit the same training on 1, 2, 4, ... nodes up to cluster.nodes for a few steps each, wait, and report how "
        "efficient each doubling is (80 % is the threshold), what the main bottleneck is, and what plan predicts. Repeating "
        "the command submits only what is missing, and shows the results.",
        composes=True,
        options=(
            Flag("--nodes", "1,2,4", "numbers of nodes to measure; default: 1, 2, 4, ... up to cluster.nodes"),
            Flag("--weak", "", "the global batch grows with the nodes; the default"),
            Flag("--strong", "", "the same global batch at all sizes"),
            Flag("--steps", "N", "steps per size; default: 50"),
            Flag("--at-once", "N", "run at most N sizes at a time"),
            Flag("--plot", "FILE", "draw the result into a .png or .svg; - draws it as text"),
            Flag("--no-wait", "", "submit, and return at once"),
            Flag("--again", "", "measure all sizes again"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=h100x8 cluster.nodes=16 model=llama3_8b parallel=fsdp train.global_batch_size=256 scale",
            "+cluster=a100x8 model=llama3_1b train.global_batch_size=64 scale --nodes 1,2,4 --strong --plot scaling.png",
        ),
        topic="planning",
    ),
    "preflight": Verb(
        "[+cluster=NAME] [key=value ...] preflight [--full] [--no-wait] [--json]",
        "check the nodes of an allocation like the config's, without training",
        "slurmtrain.cli.preflight",
        "Start a job with the config's nodes, ranks, environment and data that only compares the nodes: versions, packages, "
        "code, data, clocks, disks, GPUs, network, shared folder. With --full, it also measures GPUs and the network, and "
        "names slow nodes and pairs of nodes. Every training does the quick part by itself (preflight=off|quick|full).",
        composes=True,
        options=(
            Flag("--full", "", "also measure GPUs, collectives and pairs of nodes; takes about a minute"),
            Flag("--no-wait", "", "submit, and return at once"),
            Flag("--json", "", "print the answer as JSON, for a program"),
        ),
        examples=(
            "+cluster=a100x8 cluster.nodes=4 preflight",
            "+cluster=a100x8 cluster.nodes=4 data=prepared data.path=/data/tokens preflight --full",
        ),
        topic="preflight",
    ),
    "prepare": Verb(
        "prepare prepare.inputs='[FILE|FOLDER|PATTERN, ...]' prepare.output=FOLDER [prepare.tokenizer=FILE] [key=value ...]"
        " | prepare verify FOLDER",
        "turn raw text into tokenised shards; verify them",
        "slurmtrain.cli.prepare",
        "Turn raw text (jsonl, parquet, text, a saved Hugging Face data set; also .gz and .zst) into tokenised shards, on all "
        "CPUs of this machine. If it was stopped, the same command continues. As a job: job=prepare ... submit. verify "
        "compares every byte with its digest.",
        composes=True,
        examples=(
            "prepare prepare.inputs=raw.jsonl prepare.output=tokens  # every byte is a token",
            "prepare prepare.inputs='[/data/raw/*.jsonl.zst]' prepare.output=/data/tokens prepare.tokenizer=tokenizer.json",
            "prepare prepare.records=chat prepare.inputs=chats.jsonl prepare.output=chats prepare.tokenizer=tokenizer.json",
            "prepare verify /data/tokens",
        ),
        topic="data",
    ),
    "progress": Verb(
        "progress STEP [--of STEPS]",
        "report the progress of your own program, from inside its run",
        "slurmtrain.cli.progress",
        "Report, from inside a run, that your own program has reached STEP. status shows it, and a run that makes progress "
        "is not given up.",
        examples=("progress 500 --of 10000",),
        topic="own-scripts",
    ),
    "nodes": Verb(
        "nodes list | blame NODE [--reason TEXT] | forgive NODE|--all [--cluster NAME] [--json]",
        "show which nodes your runs exclude, and why; blame or forgive one",
        "slurmtrain.cli.nodes",
        "Show what went wrong on which node, from the ledger that your jobs on this cluster keep, and which nodes your next "
        "starts exclude. Blame or forgive a node by hand.",
        examples=(
            "nodes list",
            "nodes blame n3 --reason 'its disk is full'",
            "nodes forgive --all",
        ),
        topic="requeue",
    ),
    "probe": Verb(
        "probe [--partition NAME] [--out FILE] [--check FILE|NAME] [--account NAME] [--qos NAME] [--json] ...",
        "write conf/cluster/NAME.yaml from what SLURM reports; --check: has the cluster changed since?",
        "slurmtrain.cli.probe",
        "Ask SLURM, with a few quick commands, for partitions, limits, nodes, GPUs, preemption, accounts and "
        "containers, and write a commented conf/cluster/NAME.yaml for one partition. It has a question in place of each "
        "value that SLURM does not report. --check shows what probe would write differently today and exits with 0: nothing, "
        "1: something, or 78: jobs of the file cannot run.",
        examples=(
            "probe  # writes conf/cluster/NAME.yaml for the default partition",
            "probe --partition gpu --out -  # only print it",
            "probe --check conf/cluster/mine.yaml  # has the cluster changed since?",
        ),
        topic="clusters",
    ),
    "sandbox": Verb(
        "sandbox up|down|status|env [--nodes N] ...",
        "start a real, throwaway SLURM on this machine, without root",
        "slurmtrain.cli.sandbox",
        "Start a real, throwaway SLURM on this machine, show its state, or stop it. It does not need root.",
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
    "supervise": Verb(
        "supervise RUN_DIRECTORY ...",
        "for the batch script: start the ranks of a run, attempt after attempt, and decide how it goes on",
        "slurmtrain.cli.supervise",
        hidden=True,
    ),
}
