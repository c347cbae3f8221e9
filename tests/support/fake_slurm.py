"""SLURM's commands on PATH, with a state folder in place of a controller.

`FakeSlurm.install(folder)` puts `sbatch`, `squeue`, `scontrol`, `scancel`, `sinfo` and `srun` there. They keep jobs,
answer in the words of 22.05 to 25.11, and fail where a test says so. What only a real controller does (scheduling, signals,
time limits, preemption) belongs in tests/slurm. This one is for faults that a real one cannot be made to show, and for what is
asked and sent.

The commands import this file alone, without site-packages, so it uses nothing but the parts of the standard library
that load fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
UNREACHABLE = "Unable to contact slurm controller (connect failure)"
NO_REPLY = "Socket timed out on send/recv operation"
ENDED = tuple("COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE".split())
CONFIG = {"ClusterName": "fake", "MaxArraySize": "1001", "MinJobAge": "300 sec", "SLURM_VERSION": "22.05.8"}
# What squeue shows for a letter of --format, by the name of the job's field.
COLUMNS = {"A": "id", "F": "id", "K": "task", "T": "state", "S": "start", "r": "reason", "k": "comment"}
COLUMNS |= {"E": "dependency", "i": "element", "N": "nodes", "P": "partition", "j": "name", "u": "user"}

# Words of a command line: a job of one task a node, without GPUs, whose ranks meet on this machine.
ON_CPUS = (
    *("+cluster=a100x4", "cluster.tasks_per_node=1", "cluster.gpus_per_node=0", "cluster.gpu_type=null"),
    *("cluster.gpu_memory_gb=null", "cluster.network_interface=lo"),
)

Job = dict[str, Any]


class FakeSlurm:
    """A cluster of jobs in a folder, which is to come first on PATH.

    Attributes:
        directory: the folder with the commands and the state.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    @classmethod
    def install(cls, directory: Path) -> FakeSlurm:
        """Make the folder with its commands. Jobs are numbered from 101 on."""
        directory.mkdir(parents=True, exist_ok=True)
        fake = cls(directory)
        for name in COMMANDS:
            _script(
                directory / name,
                _START.format(python=sys.executable, folder=str(Path(__file__).parent), here=str(directory)),
            )
        return fake

    # What a test asks.

    @property
    def jobs(self) -> list[Job]:
        """The jobs in the order of their submission, each with its id, state, options, comment, script, ..."""
        return [self.job(path.stem) for path in sorted(self.directory.glob("job-*.json"), key=_number)]

    def job(self, job_id: str) -> Job:
        found = self._read(f"job-{job_id.removeprefix('job-')}", None)
        assert isinstance(found, dict), f"no job {job_id}"
        return found

    @property
    def submitted(self) -> list[str]:
        """The scripts that sbatch accepted, in order."""
        return [job["script"] for job in self.jobs]

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which sbatch ran last."""
        return dict(self.jobs[-1]["environment"])

    def calls(self, *names: str) -> list[str]:
        """The command lines so far, of these commands or of all: "scontrol requeue 101"."""
        file = self.directory / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if not names or line.partition(" ")[0] in names]

    def confs(self) -> list[str]:
        """The commands so far, each with the slurm.conf that it was run with: "squeue /etc/slurm/slurm.conf"."""
        file = self.directory / "confs"
        return file.read_text().splitlines() if file.exists() else []

    # What a test decides.

    def add(self, job_id: str, **facts: Any) -> None:
        """A job that somebody submitted before: pending, unless told otherwise. "7_2" is a task of the array 7."""
        array, _, task = job_id.partition("_")
        if task and (self.directory / f"job-{array}.json").exists():
            job = self.job(array)
            self._write(f"job-{array}", {**job, "tasks": {**job["tasks"], task: facts}})
            return
        tasks = {task: facts} if task else {}
        values = {} if task else facts
        self._write(f"job-{array}", {**_new_job(array), "array": task or None, "tasks": tasks, **values})

    def change(self, job_id: str, **facts: Any) -> None:
        """Change facts of a job, or of a task of an array: state="RUNNING", nodes="n[1-2]", restarts=1."""
        array, _, task = job_id.partition("_")
        job = self.job(array)
        if task:
            facts = {"tasks": {**job["tasks"], task: {**job["tasks"].get(task, {}), **facts}}}
        self._write(f"job-{array}", {**job, **facts})

    def forget(self, job_id: str) -> None:
        """As slurmctld does with a job that ended longer than MinJobAge ago."""
        (self.directory / f"job-{job_id}.json").unlink()

    def configure(self, **values: str) -> None:
        """Change what `scontrol show config` says."""
        self._write("config", {**self._read("config", CONFIG), **values})

    def set_clock(self, ahead_s: float) -> None:
        """Let the controller's clock be ahead of that of this machine (or behind, if negative)."""
        self._write("clock", ahead_s)

    def at(self, seconds: float) -> str:
        """The time so many seconds from now by the controller's clock, as scontrol writes it."""
        now = time.time() + self._read("clock", 0.0)
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + seconds))

    def fail(
        self, command: str, words: str = UNREACHABLE, *, times: int | None = None, done: bool = False, after: int = 0
    ) -> None:
        """Let a command fail with these words, this often (None: from now on), once it has worked `after` times.

        "scontrol requeue" names one form of a command by how its command line begins. `done`: only the reply gets lost.
        """
        self._write("faults", [*self._read("faults", []), [command, words, times, done, after]])

    def mend(self) -> None:
        """Nothing fails any more."""
        self._write("faults", [])

    def answer(self, command: str, output: str) -> None:
        """Let an exact command line print this, instead of what the state folder has: "sinfo --noheader --format=%N"."""
        self._write("answers", {**self._read("answers", {}), command: output})

    def meanwhile(self, command: str, what: str) -> None:
        """Let this happen, in bash, when a command is called next, before it does its work."""
        self._write("meanwhile", {**self._read("meanwhile", {}), command: what})

    def command(self, name: str, body: str) -> None:
        """Put a bash script in a command's place; `$here` is this folder."""
        _script(self.directory / name, f"#!/bin/bash\nhere={self.directory}\n{body}\n")

    def instead_of_sbatch(self, body: str) -> None:
        """Run this, in bash, at each submission: `"$here/real/sbatch" "$@"` is what submits."""
        (self.directory / "real").mkdir()
        (self.directory / "sbatch").rename(self.directory / "real" / "sbatch")
        self.command("sbatch", f'case " $* " in *" --test-only "*) exit 0;; esac\n{body}')

    # Running a job, as slurmd would start it on its first node.

    def start(self, job_id: str, *, task: int | None = None, **variables: str) -> subprocess.Popen[str]:
        """Start the batch script of a job on the nodes n1, n2, ..., with the variables that slurmd would set.

        With SLURM_JOB_NUM_NODES it gets so many of those that it has asked for.
        """
        import subprocess

        job = self.job(job_id)
        per_node = int(job["options"].get("ntasks-per-node", 1))
        asked = str(job["options"].get("nodes", 1)).rpartition("-")[2]
        nodes = int(variables.get("SLURM_JOB_NUM_NODES", asked))
        names = "n1" if nodes == 1 else f"n[1-{nodes}]"
        now = {"state": "RUNNING", "nodes": names, "start": self.at(0)}
        restarts = (job["tasks"].get(str(task), {}) if task is not None else job).get("restarts", 0)
        element = job_id if task is None else f"{job_id}_{task}"
        own_id = job_id if task is None else str(10_000 * int(job_id) + task)
        self.change(element, **now, **({"own_id": own_id} if task is not None else {}))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": f"{self.directory}:{os.environ['PATH']}",
            "SLURM_JOB_ID": own_id,
            "SLURM_JOB_NODELIST": names,
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(nodes * per_node),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
            "SLURM_CLUSTER_NAME": self._read("config", CONFIG)["ClusterName"],
            "SLURMD_NODENAME": "n1",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **(
                {}
                if task is None
                else {"SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "1"}
            ),
            **variables,
        }
        script = self.directory / f"script-{job_id}"
        script.write_text(job["script"])
        script.chmod(0o700)
        return subprocess.Popen(
            ["/bin/bash", str(script)],  # not the file itself: another thread may just fork while it is written
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self, job_id: str, *, task: int | None = None, timeout_s: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the batch script to its end. A job that has not been requeued meanwhile is COMPLETED or FAILED then."""
        process = self.start(job_id, task=task, **variables)
        return self.finish(process, job_id, task=task, timeout_s=timeout_s)

    def finish(
        self, process: subprocess.Popen[str], job_id: str, *, task: int | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Wait for a batch script. What it leaves behind ends with it."""
        import subprocess
        import threading

        def end_the_rest() -> None:
            process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        threading.Thread(target=end_the_rest, daemon=True).start()
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        element = job_id if task is None else f"{job_id}_{task}"
        job = self.job(job_id)
        state = job["state"] if task is None else job["tasks"][str(task)]["state"]
        if state == "RUNNING":
            self.change(element, state="FAILED" if process.returncode else "COMPLETED")
        return subprocess.CompletedProcess(process.args, process.returncode, output, "")

    def signal(self, job_id: str, number: int) -> None:
        """Signal all processes of the job's steps, and not its batch script, as a preemption does."""
        running = self._read("steps", {"running": {}})["running"]
        _signal_below({pid for step, pid in running.items() if step.startswith(f"{job_id}.")}, number)

    def _read(self, name: str, default: Any) -> Any:
        file = self.directory / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else default

    def _write(self, name: str, value: Any) -> None:
        file = self.directory / f"{name}.json"
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(value))
        new.replace(file)


_START = """#!{python} -SEs
import sys
sys.path.append({folder!r})
from fake_slurm import main
sys.exit(main(sys.argv[0].rpartition("/")[2], sys.argv[1:], {here!r}))
"""


def _script(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # a process may be reading it
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _signal_below(pids: set[int], number: int) -> None:
    """Signal all processes that these have started, however far below."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    below = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    for pid in below - pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("job-"))


def _new_job(job_id: str) -> Job:
    empty = dict.fromkeys(("comment", "dependency", "name", "nodes", "excluded", "script"), "")
    queued = {"id": job_id, "state": "PENDING", "reason": "Priority", "start": "N/A", "partition": "gpu", "user": "me"}
    return {**empty, **queued, "restarts": 0, "array": None, "tasks": {}, "options": {}, "environment": {}}


# The commands.


class _FailedError(Exception):
    """What a command says that ends with 1."""


def main(name: str, words: list[str], folder: str) -> int:
    """Be one of the commands."""
    here = Path(folder)
    fake = FakeSlurm(here)
    line = " ".join([name, *words])
    _let_happen(fake, line)
    with _locked(here):
        with open(here / "calls", "a") as calls:
            calls.write(line.replace("\n", " ") + "\n")
        with open(here / "confs", "a") as confs:
            confs.write(f"{name} {os.environ.get('SLURM_CONF', 'none')}\n")
        fault = _next_fault(fake, line)
        answers = fake._read("answers", {})
        try:
            if fault and not fault[3]:
                raise _FailedError(fault[1])
            if name == "srun" and words == ["--version"]:
                print(f"slurm {fake._read('config', CONFIG)['SLURM_VERSION']}")
                return 0
            if name == "srun":
                step = _begin_step(fake)
            else:
                print(answers[line] if line in answers else _ACTIONS[name](fake, words), end="")
            if fault:
                raise _FailedError(fault[1])
        except _FailedError as error:
            print(error if str(error).startswith(name) else f"{name}: error: {error}", file=sys.stderr)
            return 1
    if name != "srun":
        return 0
    try:
        return _srun(words, step)
    finally:
        with _locked(here):
            _end_step(fake, step)


@contextlib.contextmanager
def _locked(here: Path) -> Iterator[None]:
    with open(here / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _let_happen(fake: FakeSlurm, line: str) -> None:
    planned = fake._read("meanwhile", {})
    for command in [command for command in planned if f"{line} ".startswith(f"{command} ")]:
        import subprocess

        what = planned.pop(command)
        fake._write("meanwhile", planned)
        subprocess.run(["bash", "-c", what], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _next_fault(fake: FakeSlurm, line: str) -> list[Any] | None:
    faults = fake._read("faults", [])
    for fault in reversed(faults) if all(fault[2] is None for fault in faults) else faults:
        command, _, times, _, after = fault
        # A look with --test-only is no submission: it is to be named.
        asked_only = command == "sbatch" and "--test-only" in line
        if f"{line} ".startswith(f"{command} ") and not asked_only and times != 0:
            if after or times is not None:
                fault[4], fault[2] = max(after - 1, 0), times if after or times is None else times - 1
                fake._write("faults", faults)
            return None if after else list(fault)
    return None


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Long options (alone, or with = and a value), and the rest."""
    found, rest = {}, []
    for word in words:
        if word.startswith("--"):
            option, _, value = word[2:].partition("=")
            found[option] = value
        else:
            rest.append(word)
    return found, rest


def _sbatch(fake: FakeSlurm, words: list[str]) -> str:
    given, rest = _options(words)
    script = Path(rest[-1]).read_text() if rest else sys.stdin.read()
    lines = [line.removeprefix("#SBATCH") for line in script.splitlines() if line.startswith("#SBATCH")]
    options = {**_options([word for line in lines for word in shlex.split(line)])[0], **given}
    if "test-only" in options:
        return ""
    number = fake._read("next", 101)
    fake._write("next", number + 1)
    job = {
        **_new_job(str(number)),
        "script": script,
        "options": options,
        "comment": options.get("comment", ""),
        "dependency": options.get("dependency", ""),
        "excluded": options.get("exclude", ""),
        "array": options.get("array"),
        "name": options.get("job-name", ""),
        "partition": options.get("partition", "gpu"),
        "reason": "Dependency" if options.get("dependency") else "Priority",
        "environment": dict(os.environ),
    }
    fake._write(f"job-{number}", job)
    return f"{number}\n" if "parsable" in options else f"Submitted batch job {number}\n"


def _tasks(job: Job) -> Iterator[str]:
    """The tasks of an array by number: "0-3,7%2"."""
    for part in str(job["array"]).partition("%")[0].split(","):
        first, _, last = part.partition("-")
        yield from map(str, range(int(first), int(last or first) + 1))


def _rows(job: Job, each: bool) -> list[Job]:
    """The lines that squeue has for a job: of an array, one for each task, or one for all that are alike."""
    if job["array"] is None:
        return [{**job, "task": "N/A", "element": job["id"]}]
    rows = []
    for task in _tasks(job):
        own = job["tasks"].get(task, {})
        row = {**job, **own, "task": task, "element": f"{job['id']}_{task}"}
        rows.append({**row, "raw": own.get("own_id", job["id"])})
    if each:
        return rows
    waiting = [row for row in rows if row["state"] == "PENDING"]
    return [*({**row, "task": f"[{job['array']}]"} for row in waiting[:1]), *(r for r in rows if r not in waiting)]


def _squeue(fake: FakeSlurm, words: list[str]) -> str:
    options, _ = _options(words)
    wanted = options.get("states", os.environ.get("SQUEUE_STATES", "")).upper()
    partition = options.get("partition", os.environ.get("SQUEUE_PARTITION"))
    ids = options["jobs"].split(",") if "jobs" in options else None
    lines = []
    for job in fake.jobs:
        for row in _rows(job, "array" in options):
            if (wanted != "ALL" and row["state"] in ENDED) or (
                wanted not in ("", "ALL") and row["state"] not in wanted
            ):
                continue
            if ids is not None and not {row["id"], row["element"]} & {*ids}:
                continue
            if options.get("user", row["user"]) != row["user"] or partition not in (None, row["partition"]):
                continue
            if "me" in options and row["user"] != "me":
                continue
            shown = {**row, "comment": row["comment"] or "(null)", "dependency": row["dependency"] or "(null)"}

            def column(match: re.Match[str], shown: Job = shown) -> str:
                if match.group(1) == "D":
                    return str(len(_names(shown["nodes"])))
                name = COLUMNS[match.group(1)]
                return str(shown.get("raw", shown["id"]) if match.group(1) == "A" else shown[name])

            lines.append(re.sub(r"%\d*([A-Za-z])", column, options.get("format", "%i %T")))
    return "".join(f"{line}\n" for line in lines)


def _find(fake: FakeSlurm, element: str) -> tuple[Job, str | None]:
    """A job by its id, by that of an array's task ("7_2"), or by the task's own number."""
    array, _, task = element.partition("_")
    for job in fake.jobs:
        if job["id"] == array:
            return job, task or None
        for number, own in job["tasks"].items():
            if own.get("own_id") == element:
                return job, number
    raise _FailedError("Invalid job id specified")


def _update(fake: FakeSlurm, element: str, **facts: Any) -> None:
    job, task = _find(fake, element)
    fake.change(job["id"] if task is None else f"{job['id']}_{task}", **facts)


def _scontrol(fake: FakeSlurm, words: list[str]) -> str:
    _, (verb, *rest) = _options([word for word in words if word not in ("-o", "-d", "incomplete")])
    if verb == "show" and rest[0] == "config":
        values = "".join(f"{name} = {value}\n" for name, value in fake._read("config", CONFIG).items())
        return f"Configuration data as of {fake.at(0)}\n{values}"
    if verb == "show" and rest[0] == "job":
        job, task = _find(fake, rest[1])
        return _show(next(row for row in _rows(job, True) if task in (None, row["task"])))
    if verb == "show" and rest[0] == "hostnames":
        return "".join(f"{name}\n" for name in _names(rest[1]))
    if verb == "show" and rest[0] == "step":
        running = fake._read("steps", {"running": {}})["running"]
        found = [step for step in running if step == rest[1] or step.startswith(f"{rest[1]}.")]
        if not found:
            raise _FailedError(f"Job step {rest[1]} not found")
        return "".join(f"StepId={step} UserId=1000 State=RUNNING Partition=gpu NodeList=n1\n" for step in found)
    if verb == "requeue":
        job, task = _find(fake, rest[0])
        own = job if task is None else {**job, **job["tasks"].get(task, {})}
        if "incomplete" in words and own["state"] in ENDED:
            raise _FailedError("Job has already finished")
        _update(fake, rest[0], state="PENDING", reason="BeginTime", restarts=own["restarts"] + 1)
    elif verb == "hold":
        if _find(fake, rest[0])[0]["state"] != "PENDING":
            raise _FailedError("Job is no longer pending execution")
        _update(fake, rest[0], reason="JobHeldUser")
    elif verb == "release":
        _update(fake, rest[0], reason="Priority")
    elif verb == "update":
        changes = dict(word.split("=", 1) for word in rest)
        names = {"dependency": "dependency", "excnodelist": "excluded", "comment": "comment", "starttime": "begin"}
        facts = {names.get(name.lower(), name): value for name, value in changes.items()}  # its keywords have no case
        _update(fake, next(facts.pop(name) for name in [*facts] if name.lower() == "jobid"), **facts)
    else:
        raise _FailedError(f"invalid keyword: {verb}")
    return ""


def _names(nodes: str) -> list[str]:
    """The nodes of a list like "n[1-3,7],m1"."""
    names = []
    for prefix, inside in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?", nodes):
        for part in inside.split(",") if inside else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if part else [""]
            names += [f"{prefix}{number}" for number in numbers]
    return names


def _show(row: Job) -> str:
    """A line of `scontrol show job -o`, with the fields of 22.05."""
    task = "" if row["task"] == "N/A" else f"ArrayJobId={row['id']} ArrayTaskId={row['task']} "
    preempted = f"PreemptTime={row['preempted']} " if "preempted" in row else ""
    return (
        f"JobId={row.get('raw', row['id'])} {task}JobName={row['name'] or 'train'} UserId=me(1000) GroupId=me(1000) "
        f"MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) QOS=(null) JobState={row['state']} Reason={row['reason']} "
        f"Dependency={row['dependency'] or '(null)'} Requeue=1 Restarts={row['restarts']} BatchFlag=1 Reboot=0 ExitCode=0:0 "
        f"RunTime=00:00:01 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=2026-01-01T00:00:00 EligibleTime=2026-01-01T00:00:00 "
        f"StartTime={row['start'] if row['start'] != 'N/A' else 'Unknown'} EndTime={row.get('end', 'Unknown')} {preempted}"
        f"Partition={row['partition']} ReqNodeList=(null) ExcNodeList={row['excluded'] or '(null)'} "
        f"NodeList={row['nodes'] or '(null)'} BatchHost=n1 NumNodes=1 NumCPUs=1 NumTasks=1 Comment={row['comment']}\n"
    )


def _scancel(fake: FakeSlurm, words: list[str]) -> str:
    options, ids = _options(words)
    for element in ids:
        job, task = _find(fake, element.partition(".")[0])
        if "signal" not in options and "s" not in options:
            tasks = {number: {**own, "state": "CANCELLED"} for number, own in job["tasks"].items()} if not task else {}
            _update(fake, element, state="CANCELLED", **({"tasks": tasks} if tasks else {}))
    return ""


def _sinfo(fake: FakeSlurm, words: list[str]) -> str:
    """Every node is up and at work; a test gives other answers, or those that a real cluster gave."""
    options, _ = _options(words)
    names = [name for name in options.get("nodes", "n1,n2").split(",") if name]
    line = options.get("format", "%N %T").replace("%T", "mixed").replace("%a", "up").replace("%P", "gpu")
    lines = (line.replace("%N", name) for name in names)
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


_ACTIONS = {"sbatch": _sbatch, "squeue": _squeue, "scontrol": _scontrol, "scancel": _scancel, "sinfo": _sinfo}


def _begin_step(fake: FakeSlurm) -> str:
    """The next step of the job that srun is called in, which runs from now on: "101.0"."""
    job, known = os.environ.get("SLURM_JOB_ID", "0"), fake._read("steps", {"running": {}, "begun": {}})
    number = known["begun"].get(job, 0)
    running = {**known["running"], f"{job}.{number}": os.getpid()}
    fake._write("steps", {"running": running, "begun": {**known["begun"], job: number + 1}})
    return f"{job}.{number}"


def _end_step(fake: FakeSlurm, step: str) -> None:
    known = fake._read("steps", None)
    fake._write("steps", {**known, "running": {name: pid for name, pid in known["running"].items() if name != step}})


def _srun(words: list[str], step: str) -> int:
    """Start the tasks of a step on this machine, as if on the job's nodes, and wait for all; the greatest exit code.

    Like srun's, its options come before the command. With --kill-on-bad-exit the first task that fails ends the others.
    """
    import subprocess

    at = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    options, command = _options(words[:at])[0], words[at:]
    nodes = int(options.get("nodes", os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    if options.get("gres") == "none" and "SLURM_GPUS_PER_NODE" in os.environ:
        print("srun: error: Unable to create step: Invalid Trackable RESource (TRES) specification", file=sys.stderr)
        return 1
    told = options.get("ntasks", os.environ.get("SLURM_NTASKS"))  # with either, --ntasks-per-node is no number of tasks
    tasks = int(told or nodes * int(options.get("ntasks-per-node", "1")))
    here = max(tasks // nodes, 1)
    running: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(tasks):
        variables = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % here),
            "SLURM_NODEID": str(rank // here),
            "SLURM_NTASKS": str(tasks),
            "SLURM_NNODES": str(nodes),
            "SLURM_STEP_ID": step.partition(".")[2],
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{nodes})" if nodes > 1 else str(here),
            "SLURM_STEP_NODELIST": os.environ.get("SLURM_JOB_NODELIST", "n1"),
            "SLURMD_NODENAME": f"n{rank // here + 1}",
        }
        if "nodelist" in options:
            variables["SLURMD_NODENAME"] = _names(options["nodelist"])[rank // here]
        patterns = {"%%": "%", "%t": str(rank), "%N": variables["SLURMD_NODENAME"]}
        log = "".join(patterns.get(part, part) for part in re.split("(%[%tN])", options.get("output", "")))
        log = {"none": os.devnull, "all": ""}.get(log, log)
        with open(log, "ab") if log else contextlib.nullcontext() as output:
            running[rank] = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT if log else None
            )

    def pass_on(number: int, _: object) -> None:
        _signal_below({os.getpid()}, number)  # as SLURM signals every process of a step

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    codes = []
    by_pid = {process.pid: process for process in running.values()}
    while by_pid:
        pid, status = os.wait()
        if pid not in by_pid:
            continue
        code = os.waitstatus_to_exitcode(status)
        by_pid.pop(pid).returncode = code
        codes.append(code if code >= 0 else 128 - code)
        if code and options.get("kill-on-bad-exit", "0") in ("", "1"):
            _signal_below({os.getpid()}, signal.SIGTERM)
    return max(codes)
