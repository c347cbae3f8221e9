"""The life of a job, seen from outside: its script runs as slurmd would run it, its ranks end, and something is done about it.

The jobs of this file run at the same time, each with a cluster of its own; then each is looked at.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.system.process import wait_until
from tests.support import fake_nvml
from tests.support.fake_slurm import NO_REPLY, ON_CPUS, FakeSlurm

PROGRAM = ("job=command", "job.command='bash p.sh ${train.seed}'", "job.snapshot=none", "job.name=train")
OFF = "requeue=off"
ONCE = '[ "$SLURMTRAIN_ATTEMPT" = 2 ] || '
HOOKS = tuple(
    f"hooks.{event}='echo $SLURMTRAIN_EVENT $SLURMTRAIN_ATTEMPT $SLURMTRAIN_NEXT >>\"$SLURMTRAIN_RUN_DIR/hooks\"'"
    for event in ("on_finish", "on_failure", "on_preemption")
)
TRAIN = ("job.snapshot=none", "job.name=train")
RANK = ("cluster.python=FOLDER/project/p.sh", "train.global_batch_size=8")
SECRET = "hf_0123456789"
NASTY = ["it's", 'say "hi"', "$(touch x)", "`touch x`", "$HOME", "a;b&c|d>e", "\\", "*", "!x", "#c", "é", ""]


@dataclass
class Job:
    """A job and its end.

    Attributes:
        program: what every rank runs, in bash; $folder is the folder of this job, $1 the seed.
        words: overrides.
        job: what it runs.
        prepare: what happens between the submission and the start.
        starts: how often slurmd starts it.
        variables: of the environment that slurmd gives it.
        task: the task of the array that is started.
    """

    program: str = "exit 0"
    words: tuple[str, ...] = ()
    job: tuple[str, ...] = PROGRAM
    prepare: Callable[[Job], object] = lambda job: None
    starts: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    task: int | None = None

    folder: Path = field(init=False)
    slurm: FakeSlurm = field(init=False)
    process: subprocess.Popen[str] = field(init=False)
    codes: list[int] = field(init=False, default_factory=list)
    logs: list[str] = field(init=False, default_factory=list)

    def submit(self, folder: Path) -> None:
        self.folder = folder
        (folder / "project").mkdir(parents=True)
        program = folder / "project" / "p.sh"
        program.write_text(f"#!/bin/bash\nfolder={shlex.quote(str(folder))}\n{self.program}\n")
        program.chmod(0o700)
        words = [*self.job, *(word.replace("FOLDER", str(folder)) for word in self.words), "submit"]
        self.slurm = FakeSlurm.install(folder / "slurm")
        with pytest.MonkeyPatch.context() as here:
            here.chdir(folder / "project")
            here.setenv("PATH", f"{self.slurm.directory}:{os.environ['PATH']}")
            assert main([*ON_CPUS, "cluster.nodes=1", *words]) == 0
        self.prepare(self)
        self.start()

    def start(self) -> None:
        # Each has a ledger of its own: what one says for or against n1 is nothing to the others.
        variables = {"XDG_STATE_HOME": str(self.folder / "state"), **self.variables}
        self.process = self.slurm.start("101", task=self.task, **variables)

    def finish(self) -> None:
        done = self.slurm.finish(self.process, "101", task=self.task, timeout_s=180)
        self.codes.append(done.returncode)
        self.logs.append(done.stdout)

    @property
    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("project/runs/**/attempts"))

    @property
    def run(self) -> Path:
        (run,) = self.runs
        return run

    def attempts(self, run: Path | None = None) -> list[dict[str, Any]]:
        files = sorted((run or self.run).glob("attempts/*/attempt.json"))
        return [json.loads(file.read_text()) for file in files]

    @property
    def verdicts(self) -> str:
        return " ".join(str(attempt["verdict"]) for attempt in self.attempts())

    @property
    def copies(self) -> Path:
        """A copy of a checkpoint on a node."""
        return self.folder / "shm" / f"slurmtrain-{os.getuid()}" / f"{self.run.name}-0123"

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()


def waits_for_it(job: Job) -> None:
    """Another job waits for the success of this one."""
    job.slurm.add("55", dependency="afterok:101(unfulfilled)")


def lose_node_2(job: Job) -> None:
    """The job keeps two of its three nodes, and a copy of a checkpoint."""
    job.copies.mkdir(parents=True)
    job.slurm.answer("sinfo --noheader --all --Node --nodes=n[1-3] --format=%N %T", "n1 mixed\nn2 down*\nn3 mixed\n")
    job.slurm.answer("squeue --noheader --jobs=101 --format=%D", "2\n")


def break_gpu_3(job: Job) -> None:
    job.slurm.configure(ClusterName="another")  # which blames its n1, and leaves that of the other jobs alone
    (job.folder / "site").mkdir()
    fake = Path(fake_nvml.__file__).read_text()
    broken = "nvml.errors[3] = 2\nnvml.answers(nvmlDeviceGetRemappedRows=nvml.NVMLError())\n"
    made = f"import sys\nnvml = FakeNvml(4)\nnvml.errors = [0, 0, 0, 0]\n{broken}sys.modules['pynvml'] = nvml\n"
    (job.folder / "site" / "pynvml.py").write_text(f"{fake}\n\n{made}")


def fails(command: str, words: str, **how: Any) -> Callable[[Job], None]:
    return lambda job: job.slurm.fail(command, words, **how)


DISABLED = "Requested operation is presently disabled"
NO_STEP = "Unable to create step for job 101: Requested node configuration is not available"
CANCEL = f"{sys.executable} -m slurmtrain cancel"
# The record of the environment may be written into the folder in that moment.
BREAK = 'cd "$SLURMTRAIN_RUN_DIR/attempts"; while [ -d 0001 ]; do rm -rf 0001; done; touch 0001; '
# How the ranks end -> the exit code of the job, its state in SLURM, what is decided for each attempt, the last sentence.
ENDINGS: dict[str, tuple[Job, int, str, str, str]] = {
    "finished": (Job("exit 0", HOOKS, starts=2), 0, "COMPLETED", "done", "finished"),
    "stopped": (Job(ONCE + "exit 75", HOOKS, starts=2), 0, "COMPLETED", "requeue done", "finished"),
    "wrong config": (
        Job("exit 78", starts=2), 78, "FAILED", "end", "the config or the environment is wrong .exit code 78.",
    ),
    "crashed": (Job("exit 3", (OFF,)), 3, "FAILED", "end", "bash ended with exit code 3; it is not requeued"),
    "crashed beside a broken GPU": (
        Job("exit 3", (OFF, "+cluster.env.PYTHONPATH=FOLDER/site"), prepare=break_gpu_3),
        *(3, "FAILED", "end", "exit code 3 .GPU 3 has 2 uncorrectable ECC errors.; it is not requeued"),
    ),
    "crashed once": (Job(ONCE + "exit 3", HOOKS), 0, "COMPLETED", "in-place done", "finished"),
    "resubmitted": (
        Job("exit 75", ("requeue=resubmit",), prepare=waits_for_it), 75, "FAILED", "resubmit", "it is submitted again",
    ),
    "chain": (Job("exit 75", ("requeue=chain",)), 75, "FAILED", "next", "the next job of the chain continues"),
    "bad node": (
        Job("exit 3", ("requeue.max_attempts_without_progress=9",)),
        *(75, "PENDING", "in-place requeue", "it is requeued"),
    ),
    "bad node, no other": (
        Job("exit 3", ("requeue.max_attempts_without_progress=9",), prepare=fails("sbatch --test-only", "not available")),
        *(75, "PENDING", "in-place requeue", "it is requeued"),
    ),
    "srun refused": (Job("", (OFF,), prepare=fails("srun", NO_STEP)), 1, "FAILED", "end", "exit code 1; it is"),
    "ranks lost": (
        Job("exit 0", (OFF,), prepare=lambda job: job.slurm.command("srun", "exit 0")),
        *(1, "FAILED", "end", "ended without a word: exit code 0, and rank 0 has not said that it had finished"),
    ),
    "set-up": (
        Job("", ("cluster.setup=['export FINE=1','ls /no/such/folder','export LATER=1']", *HOOKS)),
        *(78, "FAILED", "end", "set-up failed with code 2: ls /no/such/folder"),
    ),
    "open secret": (
        Job("", ("+secrets.HF='file:FOLDER/token'",), prepare=lambda job: (job.folder / "token").chmod(0o640)),
        *(78, "FAILED", "end", r"secrets.HF: .*/token must be a file of .* that nobody else may read \(chmod 600\)"),
    ),
    "no code": (
        Job("", ("job.snapshot=cwd",), prepare=lambda job: (job.run / "code").rename(job.folder / "away")),
        *(78, "FAILED", "end", "cannot enter .*/code on "),
    ),
    "scancelled": (Job("scancel 101; exit 75"), 75, "CANCELLED", "end", "cancelled by scancel"),
    "requeue refused": (
        Job("exit 75", prepare=fails("scontrol requeue", DISABLED)),
        *(75, "FAILED", "resubmit", "it is submitted again"),
    ),
    "resubmit refused": (
        Job("exit 75", ("requeue=resubmit",), prepare=fails("sbatch", "Invalid account")),
        *(75, "FAILED", "end", "no new job could be submitted: sbatch refused the job: .*Invalid account"),
    ),
    "sbatch says nothing": (
        Job("exit 75", ("requeue=resubmit",), prepare=fails("sbatch", NO_REPLY, times=1, done=True)),
        *(75, "FAILED", "resubmit", "it is submitted again"),
    ),
    "cancelled before the requeue": (
        Job("exit 75", prepare=lambda job: job.slurm.meanwhile("scontrol requeue", f"{CANCEL} {job.run}")),
        *(75, "CANCELLED", "end", "; cancelled by `cancel RUN`"),
    ),
    "scancelled before the next job": (
        Job("exit 75", ("requeue=resubmit",), prepare=lambda job: job.slurm.meanwhile("sbatch", "scancel 101")),
        *(75, "CANCELLED", "end", "; cancelled by scancel before it started again"),
    ),
    # Nothing can be recorded of this attempt. A stop is a stop all the same.
    "unrecorded": (Job(BREAK + "exit 75"), 75, "PENDING", "", "told to stop by a signal; it is requeued"),
}  # fmt: skip
FURTHER = {
    "lingers": Job(
        "trap 'touch $folder/told' TERM; touch $folder/began; until [ -e $folder/go ]; do sleep 0.05; done; exit 75"
    ),
    "environment": Job(
        "env -0 >$folder/environment; pwd >$folder/cwd; exit 75",
        (
            *("requeue=resubmit", "job.singleton=true", "+cluster.sbatch.comment=mine"),
            "+cluster.sbatch.dependency='afterok:7'",
            *("cluster.modules=[cuda/12]", "cluster.venv=FOLDER/venv", "cluster.cpus_per_task=3"),
            *("cluster.setup=['set -e','export MADE=\"x y\" MINE=changed','sleep 600 &']",),
            *("+secrets.HF='file:FOLDER/token'", "+cluster.env.LOGIN='as ${oc.env:HF}'", "+cluster.env.B=$MADE"),
            *(f"+cluster.env.V{n}={json.dumps(v, ensure_ascii=False)}" for n, v in enumerate(NASTY)),
        ),
        variables={"MINE": 'it\'s $(touch x)\ntwo "lines"', "SLURM_JWT": "expired", "SLURM_EXPORT_ENV": "NONE"}
        | {"BASH_FUNC_module%%": '() {  echo "$@" >>/dev/null; export MODULE="$*"; }', "SQUEUE_STATES": "PENDING"},
    ),
    "it's $(touch x) 50%j": Job('pwd >"$folder/cwd"; exit 0'),
    "array": Job("exit 75", ("-m", "train.seed=5,6,7"), task=1),
    "pack": Job(
        'echo "$1 $SLURMTRAIN_ATTEMPT" >>$folder/begun; case "$1 $SLURMTRAIN_ATTEMPT" in '
        '"5 1") exit 3 ;; "6 1") exit 75 ;; "7 1") exit 78 ;; esac; exit 0',
        ("-m", "train.seed=5,6,7", "sweep.pack=3", *HOOKS),
        starts=2,
    ),
    "spare node": Job(
        "ls $folder/shm/slurmtrain-* >>$folder/copies; " + ONCE + "exit 1; exit 78",
        (*RANK, "cluster.nodes=2", "cluster.spare_nodes=1", "checkpoint.local=FOLDER/shm"),
        job=TRAIN,
        prepare=lose_node_2,
        variables={"SLURM_GPUS_PER_NODE": "a100:4"},
    ),
    "copies of a stopped run": Job(
        "exit 75", (*RANK, "checkpoint.local=FOLDER/shm"), job=TRAIN, prepare=lambda job: job.copies.mkdir(parents=True)
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    root = tmp_path_factory.mktemp("jobs")
    jobs = {name: ending[0] for name, ending in ENDINGS.items()} | FURTHER
    for name, job in jobs.items():
        folder = root / (name if "%" in name else name.replace(" ", "-"))
        folder.mkdir()
        (folder / "token").touch(0o600)
        (folder / "token").write_text(f"{SECRET}\n")
        (folder / "venv" / "bin").mkdir(parents=True)
        (folder / "venv" / "bin" / "activate").write_text(f"PATH={shlex.quote(str(folder))}/venv/bin:$PATH\n")
        python = folder / "venv" / "bin" / "python"
        kept = f"grep SigIgn /proc/$$/status >{shlex.quote(str(folder))}/ignored"
        python.write_text(f'#!/bin/bash\n{kept}\nexec {sys.executable} "$@"\n')
        python.chmod(0o700)
        job.submit(folder)
    assert wait_until((jobs["lingers"].folder / "began").exists, timeout_s=120)
    for _ in range(2):
        os.killpg(jobs["lingers"].process.pid, signal.SIGTERM)
    assert wait_until((jobs["lingers"].folder / "told").exists, timeout_s=120)
    assert jobs["lingers"].process.poll() is None and jobs["lingers"].slurm.calls("scontrol requeue") == []
    (jobs["lingers"].folder / "go").touch()
    for job in jobs.values():
        job.finish()
    again = [job for job in jobs.values() if job.starts == 2]
    for job in again:
        job.slurm.change("101", restarts=1)
        job.start()
    for job in again:
        job.finish()
    return jobs


@pytest.mark.parametrize("name", ENDINGS)
def test_how_the_ranks_end_decides_what_becomes_of_the_job(ended: dict[str, Job], name: str) -> None:
    job, code, state, verdicts, sentence = ENDINGS[name]
    assert (job.codes[-1 if name == "stopped" else 0], job.slurm.job("101")["state"]) == (code, state), job.logs
    assert job.verdicts == verdicts
    assert re.search(sentence, str(job.attempts()[-1]["sentence"]) if verdicts else job.logs[0])


def test_a_job_is_requeued_by_its_own_id_and_soon(ended: dict[str, Job]) -> None:
    calls = [call for call in ended["stopped"].slurm.calls("scontrol") if "101" in call and "show" not in call]
    assert calls == ["scontrol requeue incomplete 101", "scontrol update JobId=101 StartTime=now+8"]
    array = ended["array"]
    calls = [call for call in array.slurm.calls("scontrol") if "101" in call and "show" not in call]
    assert calls == ["scontrol requeue incomplete 101_1", "scontrol update JobId=101_1 StartTime=now+8"]
    assert [len(array.attempts(run)) for run in array.runs] == [0, 1, 0]
    for name in ("finished", "crashed", "wrong config", "scancelled", "ranks lost", "set-up"):
        assert not [call for call in ended[name].slurm.calls("scontrol", "sbatch") if "requeue" in call], name


def test_a_job_that_slurm_starts_again_after_the_run_has_ended_does_nothing(ended: dict[str, Job]) -> None:
    for name, code in (("finished", 0), ("wrong config", 1)):  # 1: who waits for the success of the run must not start
        job = ended[name]
        assert job.codes[1] == code and len(job.attempts()) == 1
        assert len(job.slurm.calls("srun")) == 1 and not job.slurm.calls("scontrol requeue")


def test_hooks_run_once_for_each_attempt_and_last(ended: dict[str, Job]) -> None:
    def hooks(name: str) -> list[str]:
        return (ended[name].run / "hooks").read_text().splitlines()

    assert hooks("finished") == ["finish 1 done"]
    assert hooks("stopped") == ["preemption 1 requeue", "finish 2 done"]
    assert sorted(hooks("crashed once")) == ["failure 1 in-place", "finish 2 done"]
    assert hooks("set-up") == ["failure 1 end"]
    requeued, hook = (ended["stopped"].logs[0].index(words) for words in ("is requeued\n", "hooks.on_preemption"))
    assert requeued < hook
    pack = [(run / "hooks").read_text().splitlines() for run in ended["pack"].runs]
    assert [sorted(each) for each in pack] == [
        ["failure 1 in-place", "finish 2 done"],
        ["finish 2 done", "preemption 1 requeue"],
        ["failure 1 end"],
    ]


def test_the_next_job_waits_for_this_one_and_has_the_environment_of_the_submission(ended: dict[str, Job]) -> None:
    job = ended["environment"]
    assert job.codes == [75]
    first, following = job.slurm.jobs
    options = following["options"]
    assert first["dependency"] == "afterok:7,singleton"  # what it has waited for does not count again
    token = f"mine slurmtrain:{job.run.name}:1"
    assert (options["comment"], options["dependency"]) == (token, "afterany:101,singleton")
    scripts = {re.sub("#SBATCH --dependency=.*", "", each["script"]) for each in (first, following)}
    assert len(scripts) == 1 and "#SBATCH --dependency=singleton\n" in following["script"]
    assert json.loads((job.run / "run.json").read_text())["job_ids"] == ["101", "102"]
    environment = following["environment"]
    assert environment["MINE"] == job.variables["MINE"]
    assert environment.keys().isdisjoint({"MADE", "LOGIN", "OMP_NUM_THREADS", "SLURMTRAIN_ATTEMPT", "SLURM_JOB_ID"})
    assert len(ended["chain"].slurm.jobs) == 4  # its next job has been there from the start
    for name in ("set-up", "unrecorded"):
        assert len(ended[name].slurm.jobs) == 1
    assert "submitted again as job 102" in ended["requeue refused"].logs[0]
    assert ended["resubmitted"].slurm.job("55")["dependency"] == "afterok:102"  # who waits for the run waits for it
    assert len(ended["sbatch says nothing"].slurm.jobs) == 2  # one of them for the first start
    assert [each["state"] for each in ended["scancelled before the next job"].slurm.jobs] == ["CANCELLED", "CANCELLED"]
    failed = ended["resubmit refused"]
    assert f"no new job was submitted; continue with: resume {failed.run.name}" in failed.logs[0]


def test_ranks_have_what_the_set_up_makes_and_values_to_the_letter(ended: dict[str, Job]) -> None:
    job = ended["environment"]
    variables = dict(pair.split("=", 1) for pair in job.text("environment").split("\0") if "=" in pair)
    assert [variables[f"V{number}"] for number in range(len(NASTY))] == NASTY
    assert variables["MODULE"] == "load cuda/12" and variables["MADE"] == "x y" and variables["B"] == "$MADE"
    assert (variables["HF"], variables["LOGIN"]) == (SECRET, f"as {SECRET}")
    assert (variables["OMP_NUM_THREADS"], variables["MINE"]) == ("3", "changed")
    # The shell that submitted decides how SLURM is asked; the script itself asks without that.
    assert variables["SQUEUE_STATES"] == "PENDING" and "SLURM_JWT" not in variables
    assert variables["SLURM_EXPORT_ENV"] == "ALL"
    assert job.text("cwd") == f"{job.folder}/project\n" and job.codes == [75]  # the set-up's own process still ran
    assert SECRET not in job.slurm.submitted[0] + job.logs[0] and SECRET not in ended["open secret"].logs[0]
    ignored = int(job.text("ignored").split()[1], 16)  # the python of cluster.venv was started with these
    assert all(ignored >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGUSR2))


def test_signals_reach_the_ranks_and_the_job_waits_for_the_last_one(ended: dict[str, Job]) -> None:
    job = ended["lingers"]
    assert (job.codes, job.slurm.job("101")["state"]) == ([75], "PENDING"), job.logs
    assert job.attempts()[-1]["sentence"] == "told to stop by SIGTERM; it is requeued"


def test_a_node_on_which_every_start_crashes_is_left_out_unless_no_other_is_left(ended: dict[str, Job]) -> None:
    bad, only = ended["bad node"], ended["bad node, no other"]
    assert (bad.slurm.job("101")["excluded"], only.slurm.job("101")["excluded"]) == ("n1", "")
    assert "job 101 is requeued, without n1" in bad.logs[0]
    assert "n1 cannot be excluded, since the job might then never start: " in only.logs[0]


def test_folders_may_have_odd_names(ended: dict[str, Job]) -> None:
    job = ended["it's $(touch x) 50%j"]
    assert job.codes == [0] and job.verdicts == "done", job.logs
    assert (job.run / "attempts/0001/rank-0.log").exists() and job.text("cwd") == f"{job.folder}/project\n"
    assert job.slurm.job("101")["options"]["output"] == f"{job.run}/slurm-".replace("%", "%%") + "%j.log"
    assert not list(job.folder.rglob("x"))


def test_runs_of_a_pack_start_again_alone_and_its_job_is_requeued_once_for_those_that_go_on(
    ended: dict[str, Job],
) -> None:
    job = ended["pack"]
    assert job.codes == [75, 1], job.logs  # of the run with the wrong config
    assert sorted(job.text("begun").splitlines()) == ["5 1", "5 2", "6 1", "6 2", "7 1"]
    verdicts = [[each["verdict"] for each in job.attempts(run)] for run in job.runs]
    assert verdicts == [["in-place", "done"], ["requeue", "done"], ["end"]]
    assert [call for call in job.slurm.calls("scontrol") if "requeue" in call] == ["scontrol requeue incomplete 101"]


def test_a_dead_node_is_replaced_by_a_spare_one_and_copies_of_checkpoints_leave_the_nodes_after_a_crash(
    ended: dict[str, Job],
) -> None:
    job = ended["spare node"]
    assert job.slurm.job("101")["options"]["nodes"] == "3" and "no-kill" in job.slurm.job("101")["options"]
    ranks = [call for call in job.slurm.calls("srun") if " train " in call]
    both = ["--nodes=2", "--ntasks=2"]
    assert [re.findall(r"--n\S+", call) for call in ranks] == [both, [*both, "--nodelist=n1,n3"]], job.logs
    assert job.text("copies").count(job.copies.name) == 4  # both ranks, in both attempts
    assert not job.copies.exists() and ended["copies of a stopped run"].copies.exists()
    assert [call for call in job.slurm.calls("srun") if "rm -rf" in call and "--nodes=2" in call]  # those that are left


# A node without the run directory.


def never_left_out(slurm: FakeSlurm) -> None:
    slurm.fail("scontrol update", DISABLED)
    slurm.command("sleep", "exit 0")


NODE_LOST: dict[str, tuple[int, dict[str, Any], Callable[[FakeSlurm], object]]] = {
    # the config names a folder that no node has, as far as anybody knows
    "at the first start": (78, {"restarts": 0}, lambda slurm: None),
    "at a restart": (75, {"excluded": "n1", "state": "PENDING", "begin": "now+8"}, lambda slurm: None),
    "beside others": (75, {"excluded": "n[2-8],n1"}, lambda slurm: slurm.change("101", excluded="n[2-8]")),
    "beside too many": (78, {"excluded": "n[2-9]"}, lambda slurm: slurm.change("101", excluded="n[2-9]")),
    # or it would come back to this node for ever
    "not to be left out": (75, {"excluded": "", "reason": "JobHeldUser"}, never_left_out),
}


def test_a_job_that_starts_again_on_a_node_without_the_run_directory_starts_elsewhere_and_not_for_ever(
    ended: dict[str, Job], tmp_path: Path
) -> None:
    submitted = ended["finished"].slurm.job("101")
    script = submitted["script"].replace(str(ended["finished"].run), str(tmp_path / "gone"))
    running = {}
    for name, (_, facts, prepare) in NODE_LOST.items():
        slurm = FakeSlurm.install(tmp_path / name)
        slurm.add("101", script=script, options=submitted["options"], restarts=facts.get("restarts", 1))
        prepare(slurm)
        running[name] = slurm, slurm.start("101")
    for name, (slurm, process) in running.items():
        code, facts, _ = NODE_LOST[name]
        done = slurm.finish(process, "101")
        job = slurm.job("101")
        assert (name, done.returncode) == (name, code), done.stdout
        assert {key: job[key] for key in facts} == {**facts, **({"restarts": 0} if "restarts" in facts else {})}, name
        assert "cannot write to" in done.stdout and "is its file system mounted" in done.stdout
        assert bool([call for call in slurm.calls("scontrol") if "requeue incomplete 101" in call]) == (code == 75)
