"""The SLURM client: parsing what 22.05 prints, and saying what went wrong."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from slurmtrain.errors import ClusterError
from slurmtrain.slurm.client import NoAnswerError, SlurmClient
from slurmtrain.slurm.command_environment import clean_environment
from slurmtrain.slurm.job_facts import JobFacts, QueuedJob, changed_dependency, parse_show_job
from tests.support.fake_slurm import FakeSlurm

# `scontrol show job -o 1`, 22.05, of a job whose comment tries to look like fields.
SHOW_JOB = (
    "JobId=1 JobName=train UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:01 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=2026-11-21T10:13:55 EligibleTime=2026-11-21T10:13:56 "
    "AccrueTime=2026-11-21T10:13:55 StartTime=2026-11-21T10:13:57 EndTime=2026-11-21T11:13:57 Deadline=N/A "
    "PreemptEligibleTime=2026-11-21T10:13:55 PreemptTime=None SuspendTime=None SecsPreSuspend=0 "
    "LastSchedEval=2026-11-21T10:13:55 Scheduler=Backfill Partition=low AllocNode:Sid=localhost:10679 "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=n[0-1] BatchHost=n0 NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 "
    "ReqB:S:C:T=0:0:*:* TRES=cpu=4,mem=2000M,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* "
    "MinCPUsNode=1 MinMemoryCPU=2000M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK "
    "Contiguous=0 Licenses=(null) Network=(null) Command=/home/me/j.sh WorkDir=/home/me "
    'Comment=it\'s "mine" JobState=FAILED Restarts=9 #1  StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power= \n'
)


def answers(stdout: str = "", returncode: int = 0, stderr: str = "") -> tuple[SlurmClient, list[list[str]]]:
    """A client whose commands all answer this, and the commands that it ran."""
    ran: list[list[str]] = []

    def run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        ran.append(list(command))
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    return SlurmClient(run=run), ran


def never_answers(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    raise subprocess.TimeoutExpired(command, 60)


def seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


# Parsing.


def test_the_facts_of_a_job_are_read_and_its_comment_cannot_fake_them() -> None:
    begin, end = seconds("2026-11-21T10:13:57"), seconds("2026-11-21T11:13:57")
    facts = JobFacts("RUNNING", "None", 2, start_time=begin, end_time=end, preempt_time=None, nodes="n[0-1]")
    assert parse_show_job(SHOW_JOB) == facts
    for text in ("", "\n", "slurm_load_jobs error: Invalid job id specified\n", "No jobs in the system\n"):
        assert parse_show_job(text) is None


def test_only_a_preemption_of_this_life_counts() -> None:
    """22.05 keeps PreemptTime of an earlier life after a restart."""
    lives = {(None, 5.0): False, (7.0, 5.0): True, (5.0, 5.0): True, (4.0, 5.0): False, (4.0, None): True}
    for (preempt_time, start_time), preempted in lives.items():
        assert JobFacts("RUNNING", start_time=start_time, preempt_time=preempt_time).preempted is preempted


@pytest.mark.parametrize(
    ("words", "answered"),
    [
        ("Requested operation is presently disabled", True),
        ("Invalid job id specified", True),
        ("Unable to contact slurm controller (connect failure)", False),
        ("Socket timed out on send/recv operation", False),
    ],
)
def test_a_controller_that_does_not_answer_is_told_from_one_that_refuses(
    words: str, answered: bool, slurm: FakeSlurm
) -> None:
    client, _ = answers("", 1, f"slurm_requeue error: {words}\n")
    with pytest.raises(ClusterError, match="scontrol requeue") as error:
        client.requeue("7")
    assert isinstance(error.value, NoAnswerError) != answered
    with pytest.raises(NoAnswerError):
        SlurmClient(run=never_answers).requeue("7")


def test_a_job_is_found_by_a_word_of_its_comment(slurm: FakeSlurm) -> None:
    told = "5|CANCELLED|slurmtrain:RUN:1\n6|RUNNING|(null)\n7|PENDING|mine | and slurmtrain:RUN:12\n"
    client, _ = answers(f"{told}8|PENDING|slurmtrain:RUN:1\n")
    assert client.find_by_comment("slurmtrain:RUN:1") == ["8"]
    assert client.find_by_comment("slurmtrain:RUN:") == ["7", "8"]
    assert client.find_by_comment("slurmtrain:RUN:2") == []


SEVERAL = "afterok:3(unfulfilled),afterok:12(unfulfilled),singleton(unfulfilled)"


def test_who_waits_for_a_run_waits_for_its_next_job_and_no_more_when_it_has_finished() -> None:
    # afterany waits for a successor of its own
    others = dict.fromkeys(
        ("afterany:12(unfulfilled)", "afterok:123(unfulfilled)", "afterok:12_1(unfulfilled)", "(null)", "")
    )
    moved = {"afterok:12(unfulfilled)": "afterok:99", SEVERAL: "afterok:3,afterok:99,singleton", **others}
    moved["afterok:12"] = "afterok:99"  # without a remark
    assert {text: changed_dependency(text, "12", "99") for text in moved} == moved
    left = {"afterok:12(unfulfilled)": "", SEVERAL: "afterok:3,singleton", **others}
    left["afterok:12(unfulfilled)?afterok:13(unfulfilled)"] = ""  # one of them was enough
    assert {text: changed_dependency(text, "12", None) for text in left} == left


def test_whether_a_partition_has_all_its_nodes(slurm: FakeSlurm) -> None:
    whole = ("up idle\nup mixed\nup idle~\nup completing\n", "up idle~\nup mixed-\n")
    lacks = (
        *("up idle\nup drained\n", "up down*\n", "down idle\n", "up reserved\n", "up idle!\n", "up idle^\n"),
        "up idle*\n",  # it does not answer
        *("up idle\nup idle%\n", "up idle\nup mixed#\n"),  # powers down, and is left out until it has
        "",  # all of its nodes are in a cloud, and off
    )
    for shown in (*whole, *lacks):
        assert answers(shown)[0].lacks_nodes("low") is (shown in lacks), shown
    assert answers(returncode=1)[0].lacks_nodes("low")


# Asking.


ANSWERS_CHANGED = {"SQUEUE_PARTITION": "p", "SQUEUE_STATES": "CD", "SCONTROL_LOCAL": "1", "SCANCEL_STATE": "PD"}
ANSWERS_CHANGED |= {"SINFO_ALL": "1", "SACCT_FORMAT": "x", "SLURM_TIME_FORMAT": "relative", "SLURM_BITSTR_LEN": "1"}
OF_A_JOB = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CPU_BIND", "SUBMITIT_X", "SLURMTRAIN_RUN_DIR", "SRUN_DEBUG")
ANSWERS_CHANGED |= dict.fromkeys(OF_A_JOB, "7")
WHERE_AND_WHO = {"SLURM_CONF": "/etc/a.conf", "SLURM_CONF_SERVER": "login:6817", "SLURM_CLUSTERS": "b"}
WHERE_AND_WHO |= {"SLURM_JWT": "token", "SLURM_SACK_SOCKET": "/run/sack"}


def test_commands_see_where_slurm_is_and_who_asks_and_nothing_that_changes_the_answer() -> None:
    mine = {"PATH": "/bin", "SLURMTRAIN_RUNS": "runs", "SBATCH_ACCOUNT": "a", "SLURMY": "b"}
    assert clean_environment({**ANSWERS_CHANGED, **WHERE_AND_WHO, **mine}) == {**WHERE_AND_WHO, **mine}


def test_an_unknown_job_is_none_and_an_answer_that_says_nothing_does_not_mean_that_it_is_gone(slurm: FakeSlurm) -> None:
    for stdout, stderr in (("", "slurm_load_jobs error: Invalid job id specified\n"), ("Job 12_99 not found\n", "")):
        assert answers(stdout, 1, stderr)[0].look("12_99") is None
    for stdout in ("", "\n", "this login node is to be restarted at noon\n"):
        client, _ = answers(stdout)
        with pytest.raises(ClusterError, match="does not say what the job does"):
            client.look("12")
        assert client.job("12") is None


def test_a_step_that_slurm_does_not_know_any_more_is_over() -> None:
    for shown, code, lives in (
        ("StepId=17.0 UserId=0 StartTime=2026-11-21T10:13:57", 0, True),
        ("StepId=17.01 UserId=0", 0, False),
        ("Job step 17.0 not found", 1, False),  # on stdout, of a job that goes on
        ("slurm_get_job_steps error: Invalid job id specified", 1, False),
    ):
        assert answers(shown, code)[0].step_lives("17.0") is lives


def test_one_squeue_call_finds_jobs_and_array_elements(slurm: FakeSlurm) -> None:
    client, ran = answers(
        "2|2_0|PENDING|N/A|JobHeldUser|(null)\n12|2_1|RUNNING|2026-01-02T03:04:05|None|mine slurmtrain:a:1\n"
        "1|1_N/A|RUNNING|N/A|None\n"
        "7|7_N/A|PENDING|N/A|Nodes required for job are DOWN, DRAINED|or reserved|(null)\n"
    )
    assert client.queue(["1", "2_1", "7", "99", "2_0"]) == {
        "2_0": QueuedJob("PENDING", "JobHeldUser", "N/A"),
        "2_1": QueuedJob("RUNNING", "None", "2026-01-02T03:04:05", ("mine", "slurmtrain:a:1")),
        "1": QueuedJob("RUNNING", "None", "N/A"),
        "7": QueuedJob("PENDING", "Nodes required for job are DOWN, DRAINED|or reserved", "N/A"),
    }
    assert len(ran) == 1


ACTIONS: list[Callable[[SlurmClient], object]] = [
    lambda client: client.queue(["1"]),
    lambda client: client.cancel("1"),
    lambda client: client.signal("1", "TERM"),
    lambda client: client.release("1"),
    lambda client: client.update_pending("1", StartTime="now"),
    lambda client: client.find_by_comment("x"),
]


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_says_when_the_controller_is_silent_refuses_or_is_not_there(
    action: Callable[[SlurmClient], object], slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match=r"did not answer `s(queue|cancel|control)` within 60 s"):
        action(SlurmClient(run=never_answers))
    with pytest.raises(ClusterError, match="failed: Access/permission denied"):
        action(answers(returncode=1, stderr="x\nAccess/permission denied\n")[0])
    with pytest.raises(ClusterError, match="failed: exit code 3"):
        action(answers(returncode=3)[0])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"there is no `s(queue|cancel|control)` on this machine"):
        action(answers()[0])


# The environment.
