"""cluster=first: a run in several queues is taken by one job, whoever starts when and whoever dies when."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ClusterError, ConfigError, UnreadableRecordError
from slurmtrain.launch import node_exclusion, submit_first
from slurmtrain.launch.submit import preparing
from slurmtrain.launch.submit_first import write_choices
from slurmtrain.launch.submit_once import submit_exactly_once
from slurmtrain.report.status import look, queue
from slurmtrain.report.status.look import state
from slurmtrain.runs import lookup
from slurmtrain.runs.choices import (
    CHOICES_MAX,
    Choice,
    Claim,
    Standing,
    choices_of,
    claim_of,
    is_open,
    open_again,
    standing_of,
    take,
)
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import RunAction
from slurmtrain.runs.requests import write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.take_run import take_or_leave
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.job_states import GONE
from tests.support.commands import FakeSlurm
from tests.support.runs import add_attempt

TO_TWO = ["cluster=first", "cluster.choices=[a100x4,h100x8]", "train.steps=50"]


class Slurm:
    """One SLURM of which each job is `states[id]`, with the token of its choice; None: it does not answer."""

    def __init__(self, run: RunDir, **states: str | None):
        self.jobs = {job.removeprefix("j"): word for job, word in states.items()}
        self.tokens = {choice.job_id: f"slurmtrain:{choice.token}" for choice in choices_of(run)}
        self.cancelled: list[str] = []
        self.answers = True

    def __call__(self, conf: str | None) -> Slurm:
        return self

    def look(self, job_id: str) -> JobFacts | None:
        if not self.answers:
            raise ClusterError("SLURM does not answer")
        word = self.jobs.get(job_id)
        return JobFacts(word) if word is not None else None

    def find_by_comment(self, word: str, *, states: Collection[str] | None = None) -> list[str]:
        if not self.answers:
            raise ClusterError("SLURM does not answer")
        there = {job: state for job, state in self.jobs.items() if self.tokens.get(job) == word and state not in GONE}
        return [job for job, state in there.items() if states is None or state in states]

    def cancel(self, *job_ids: str) -> None:
        self.cancelled += job_ids
        self.jobs |= dict.fromkeys(job_ids, "CANCELLED")


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """sbatch gives the ids 1, 2, ...; squeue shows them, waiting, until they are cancelled."""
    monkeypatch.setattr(queue, "CONFIRM_EVERY_S", 0.0)
    fake_slurm.command(
        "sbatch",
        'n=$(($(ls "$here" | grep -c "^script-") + 1)); cp "${!#}" "$here/script-$n"\n'
        'for word in "$@"; do case "$word" in --comment=*) comment="${word#--comment=}" ;; esac; done\n'
        'echo "$n PENDING $comment" >>"$here/jobs"; echo "Submitted batch job $n"',
    )
    fake_slurm.command(
        "squeue",
        'while read -r job word comment; do case "$*" in\n'
        '*%A*) echo "$job|${job}_N/A|$word|N/A|Priority|$comment" ;;\n'
        '*) echo "$job|$word|$comment" ;; esac; done <"$here/jobs"',
    )
    fake_slurm.command("scancel", 'for job in "$@"; do sed -i "s/^$job PENDING/$job CANCELLED/" "$here/jobs"; done')
    return fake_slurm


@pytest.fixture
def queued(project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> RunDir:
    """A run that was submitted to two clusters, as job 1 of a100x4 and job 2 of h100x8."""
    assert main([*TO_TWO, "submit", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["choices"] == {"a100x4": "1", "h100x8": "2"}
    return RunDir(Path(said["path"]))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("project")
    words = ["train.steps=50", f"job.runs_dir={project}/runs"]
    configs = {name: compose([f"cluster={name}", *words]) for name in ("a100x4", "h100x8")}
    with preparing(configs["a100x4"], TO_TWO, project) as run_dir:
        write_choices(run_dir, configs, dict.fromkeys(configs), project)
    for number, choice in enumerate(choices_of(run_dir)):
        replace(choice, token=f"{run_dir.id}:first0.{choice.name}", job_id=str(number + 1)).write()
    return run_dir.path


@pytest.fixture
def run(template: Path, tmp_path: Path) -> RunDir:
    """Such a run, without a SLURM."""
    return RunDir(Path(shutil.copytree(template, tmp_path / template.name)))


def no_links(source: Path, target: Path) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source)


def no_sleep(seconds: float) -> None:
    pass


def starts(run: RunDir, choice: str, job_id: str, slurm: Slurm) -> bool:
    return take_or_leave(run, choice, job_id, slurm, no_sleep)  # type: ignore[arg-type]


def told(run: RunDir, event: Event) -> list[dict[str, object]]:
    return [each for each in run.events() if each["event"] == event]


# One takes it.


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_start_at_the_same_moment_one_takes_the_run(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system has no hard links."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    run = RunDir(tmp_path)
    run.choices.mkdir()
    gate, claims = threading.Barrier(8), []

    def start(number: int) -> None:
        gate.wait()
        claims.append(take(run, f"c{number}", str(number), lambda claim: False))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claims)) == 1 and len(claims) == 8 and claim_of(run) == claims[0]
    assert [path.name for path in run.choices.iterdir()] == ["taken-0001"]
    assert [path.name for path in (run.choices / "taken-0001").iterdir()] == ["claim.json"]


def test_the_first_that_starts_makes_the_run_its_own_and_takes_the_others_back(run: RunDir) -> None:
    slurm = Slurm(run, j1="PENDING", j2="RUNNING")
    assert is_open(run) and starts(run, "h100x8", "2", slurm)
    assert slurm.cancelled == ["1"] and not is_open(run)
    config = load_frozen(run.config_file, with_secrets=False)
    assert (config.cluster.gpu_type, config.cluster.choices, config.train.steps) == ("h100", [], 50)
    assert "gpus-per-node=h100:8" in run.script.read_text() and "take-run" not in run.script.read_text()
    assert run.info()["job_ids"] == ["2"]
    assert [event["choice"] for event in told(run, Event.TAKEN)] == ["h100x8"]


def test_one_that_starts_later_leaves_with_a_word_and_without_an_attempt(run: RunDir) -> None:
    slurm = Slurm(run, j1="RUNNING", j2="RUNNING")
    assert starts(run, "h100x8", "2", slurm)
    assert slurm.cancelled == []  # it had begun before it could be taken back, and leaves by itself
    begun = run.attempt(run.new_attempt()).path
    assert not starts(run, "a100x4", "1", slurm)
    assert run.info()["job_ids"] == ["2"] and list(run.attempts.iterdir()) == [begun]
    assert [event["sentence"] for event in told(run, Event.NOT_TAKEN)] == ["job 2 of h100x8 has it"]


def test_the_winner_keeps_the_run_when_it_is_requeued_and_what_was_changed_since_stays(run: RunDir) -> None:
    slurm = Slurm(run, j1="PENDING", j2="RUNNING")
    assert starts(run, "h100x8", "2", slurm)
    run.config_file.write_text(run.config_file.read_text() + "# changed by the person since\n")
    assert starts(run, "h100x8", "2", slurm)
    assert run.config_file.read_text().endswith("since\n") and run.info()["job_ids"] == ["2"]


# Whoever dies when.


def test_a_job_that_is_killed_before_it_took_the_others_back_has_that_done_by_its_next_start(run: RunDir) -> None:
    take(run, "h100x8", "2", lambda claim: False)  # and then it was killed, and requeued
    slurm = Slurm(run, j1="PENDING", j2="RUNNING")
    assert starts(run, "h100x8", "2", slurm)
    assert slurm.cancelled == ["1"] and run.info()["job_ids"] == ["2"]


def test_a_job_that_dies_after_it_took_the_run_and_before_it_began_loses_it_to_the_next(run: RunDir) -> None:
    take(run, "h100x8", "2", lambda claim: False)
    slurm = Slurm(run, j1="RUNNING", j2="NODE_FAIL")
    assert starts(run, "a100x4", "1", slurm)
    assert claim_of(run) == Claim(2, "a100x4", "1") and run.info()["job_ids"] == ["1"]
    run.new_attempt()
    slurm.jobs["2"] = "RUNNING"  # somebody revives it
    assert not starts(run, "h100x8", "2", slurm)


def waits_while(run: RunDir, slurm: Slurm, *turns: Callable[[], object]) -> tuple[bool, list[float]]:
    """Start job 1 of a100x4, which finds the run taken; at each of its pauses the next of `turns` comes to pass."""
    to_come, pauses = list(turns), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if to_come:
            to_come.pop(0)()
        assert len(pauses) < 100, "it waits for ever"

    return take_or_leave(run, "a100x4", "1", slurm, sleep), pauses  # type: ignore[arg-type]


def test_a_job_waits_for_one_that_has_the_run_and_has_not_begun_and_takes_over_when_slurm_says_that_it_is_gone(
    run: RunDir,
) -> None:
    """A dead node is noticed after SlurmdTimeout: until then its job is RUNNING. With requeue.mode=off nothing else trains."""
    take(run, "h100x8", "2", lambda claim: False)
    slurm = Slurm(run, j1="RUNNING", j2="RUNNING")

    def goes(word: str) -> Callable[[], object]:
        return lambda: slurm.jobs.update({"2": word})

    taken, pauses = waits_while(run, slurm, *[lambda: None] * 20, goes("COMPLETING"), goes("NODE_FAIL"))
    assert taken and claim_of(run) == Claim(2, "a100x4", "1") and slurm.cancelled == []
    assert sum(pauses) > 250 and len(pauses) < 30  # few calls of scontrol


def test_a_job_that_waits_leaves_as_soon_as_the_run_has_begun_is_cancelled_or_goes_back_to_the_queue(
    run: RunDir,
) -> None:
    def begins() -> None:
        run.new_attempt()

    def is_cancelled() -> None:
        write_request(run, RunAction.CANCEL)

    take(run, "h100x8", "2", lambda claim: False)
    slurm = Slurm(run, j1="RUNNING", j2="RUNNING")
    for turn in (lambda: slurm.jobs.update({"2": "PENDING"}), is_cancelled):
        slurm.jobs["2"] = "RUNNING"
        assert waits_while(run, slurm, turn) == (False, [1.0])
    run.request_file.unlink()
    slurm.jobs["2"] = "RUNNING"
    assert waits_while(run, slurm, begins) == (False, [1.0])
    assert claim_of(run) == Claim(1, "h100x8", "2")


def test_a_job_that_had_started_when_the_run_was_taken_is_there_to_take_over(run: RunDir) -> None:
    slurm = Slurm(run, j1="RUNNING", j2="RUNNING")
    assert starts(run, "h100x8", "2", slurm) and slurm.cancelled == []
    slurm.jobs["2"] = "NODE_FAIL"
    assert starts(run, "a100x4", "1", slurm)


def test_a_job_that_was_taken_for_gone_before_it_began_leaves_the_run_to_the_one_that_has_it(run: RunDir) -> None:
    class Hidden(Slurm):
        def find_by_comment(self, word: str, *, states: Collection[str] | None = None) -> list[str]:
            take(run, "a100x4", "1", lambda claim: True)  # meanwhile
            return super().find_by_comment(word, states=states)

    assert not starts(run, "h100x8", "2", Hidden(run, j1="RUNNING", j2="RUNNING"))
    assert claim_of(run) == Claim(2, "a100x4", "1")
    assert [event["sentence"] for event in told(run, Event.NOT_TAKEN)] == ["job 1 of a100x4 has it"]


def test_a_job_that_died_while_it_made_the_run_its_own_leaves_nothing_of_that(run: RunDir) -> None:
    take(run, "h100x8", "2", lambda claim: False)
    run.config_file.write_text((run.choices / "h100x8" / "config.yaml").read_text())
    assert starts(run, "a100x4", "1", Slurm(run, j1="RUNNING", j2="FAILED"))
    assert load_frozen(run.config_file, with_secrets=False).cluster.gpu_type == "a100"


def test_a_job_that_cannot_ask_about_the_one_that_has_the_run_leaves_it_alone(run: RunDir) -> None:
    take(run, "h100x8", "2", lambda claim: False)
    slurm = Slurm(run, j1="RUNNING")
    slurm.answers = False
    taken, pauses = waits_while(run, slurm)
    assert not taken and len(pauses) < 10
    assert [event["sentence"] for event in told(run, Event.NOT_TAKEN)] == [
        "job 2 of h100x8 has it, and whether it will begin is not known here"
    ]


def test_the_jobs_of_a_third_choice_stay_while_it_is_not_known_whether_the_first_will_begin(run: RunDir) -> None:
    shutil.copytree(run.choices / "a100x4", run.choices / "third")
    replace(choices_of(run)[0], folder=run.choices / "third", name="third", token="x", job_id="3").write()
    take(run, "h100x8", "2", lambda claim: False)

    class Mute(Slurm):
        def look(self, job_id: str) -> JobFacts | None:
            raise ClusterError("no answer")

    slurm = Mute(run, j1="RUNNING", j2="RUNNING", j3="PENDING")
    assert not waits_while(run, slurm)[0] and slurm.cancelled == []
    run.new_attempt()
    assert not waits_while(run, slurm)[0] and slurm.cancelled == ["3"]


def test_a_job_that_comes_late_into_the_queue_is_taken_back_only_while_it_waits(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has started may have taken the run meanwhile from a job that died."""
    take(run, "h100x8", "2", lambda claim: False)
    slurm = Slurm(run, j1="PENDING")
    monkeypatch.setattr(submit_first, "SlurmClient", slurm)
    monkeypatch.setattr(submit_first, "submit_exactly_once", lambda script, folder, token, *_, **__: "1")
    monkeypatch.setattr(node_exclusion, "for_new_job", lambda *_: node_exclusion.Exclusion())
    (choice,) = [each for each in choices_of(run) if each.name == "a100x4"]
    for number, word in enumerate(("RUNNING", "PENDING")):
        slurm.jobs["1"] = word
        slurm.tokens["1"] = f"slurmtrain:{run.id}:first{number}.a100x4"
        submit_first._submit(run, choice, number)
        assert slurm.cancelled == ["1"] * (word == "PENDING")


class Killed(BaseException):
    """What no handler takes for an error, as of a process that is killed."""


@pytest.mark.parametrize("call", ["mkdir", "open", "rename"])
@pytest.mark.parametrize("done", [False, True])
def test_whoever_opens_the_run_again_may_be_killed_between_any_two_calls(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, call: str, done: bool
) -> None:
    """Then the run has the claim of before, or none, and the next job ends with one: it does not look for ever."""
    take(run, "h100x8", "2", lambda claim: False)
    take(run, "a100x4", "1", lambda claim: True)
    whole = getattr(os, call)

    def dies(*args: object, **options: object) -> object:
        made = whole(*args, **options) if done else None
        if "taken-0003" in str(args[0]):
            raise Killed
        return made if done else whole(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, dies)
        with contextlib.suppress(Killed):
            open_again(run)
    assert claim_of(run) in (Claim(2, "a100x4", "1"), None)
    open_again(run)
    assert claim_of(run) is None
    assert take(run, "h100x8", "4", lambda claim: False) == claim_of(run) == Claim(4, "h100x8", "4")


def test_claims_are_numbered_by_their_names_though_earlier_ones_are_gone(run: RunDir) -> None:
    take(run, "h100x8", "2", lambda claim: False)
    take(run, "a100x4", "1", lambda claim: True)
    shutil.rmtree(run.choices / "taken-0001")
    assert take(run, "h100x8", "3", lambda claim: True) == Claim(3, "h100x8", "3")


def test_many_claims_hide_no_choice(run: RunDir) -> None:
    """A run that is resumed again and again has many; and a process that was killed leaves a hidden folder."""
    for number in range(3 * CHOICES_MAX):
        (run.choices / f"taken-{number + 1:04d}").mkdir()
        (run.choices / f".taken-{number + 1:04d}.7.00ff").mkdir()
    os.rename(run.choices / "h100x8", run.choices / "zeta")
    assert [choice.name for choice in choices_of(run)] == ["a100x4", "zeta"]


def test_a_run_that_has_begun_is_not_taken_by_another_though_its_job_is_gone(run: RunDir) -> None:
    slurm = Slurm(run, j1="PENDING", j2="RUNNING")
    assert starts(run, "h100x8", "2", slurm)
    add_attempt(run, job_id="2")
    slurm.jobs |= {"1": "RUNNING", "2": "NODE_FAIL"}
    assert not starts(run, "a100x4", "1", slurm)


@pytest.mark.parametrize(
    ("word", "has_begun", "standing"),
    [
        (None, False, Standing.GIVEN_UP),
        ("FAILED", False, Standing.GIVEN_UP),
        ("NODE_FAIL", False, Standing.GIVEN_UP),
        ("TIMEOUT", False, Standing.GIVEN_UP),
        ("CANCELLED", False, Standing.HOLDS),  # a person's scancel ends the run
        ("PENDING", False, Standing.HOLDS),  # requeued
        ("REVOKED", False, Standing.HOLDS),  # it runs at another cluster of a federation
        ("CONFIGURING", False, Standing.UNDECIDED),
        ("RUNNING", False, Standing.UNDECIDED),
        ("COMPLETING", False, Standing.UNDECIDED),
        ("RUNNING", True, Standing.HOLDS),
        (None, True, Standing.HOLDS),
        ("NODE_FAIL", True, Standing.HOLDS),
    ],
)
def test_the_rule_by_which_a_claim_is_given_up(word: str | None, has_begun: bool, standing: Standing) -> None:
    assert standing_of(word, has_begun=has_begun) == standing


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"choice": 1, "job_id": "2"}', '{"job_id": "2"}', '{"choice": "h100x8", "job_id": "-a"}']
)
def test_a_claim_that_cannot_be_read_is_nobodys_to_take(run: RunDir, text: str) -> None:
    (run.choices / "taken-0001").mkdir()
    (run.choices / "taken-0001" / "claim.json").write_text(text)
    with pytest.raises(UnreadableRecordError, match=r"taken-0001/claim\.json"):
        starts(run, "a100x4", "1", Slurm(run, j1="RUNNING"))
    assert run.info()["job_ids"] == []


def test_a_node_that_cannot_write_there_leaves_the_run_to_the_next(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, mode: int = 0o777) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        assert main(["take-run", str(run.path), "a100x4"]) != 0
    said = capsys.readouterr()
    assert said.out == "" and "is its file system mounted and writable here?" in said.err
    assert starts(run, "h100x8", "2", Slurm(run, j1="FAILED", j2="RUNNING"))


# What a person sees and asks for.


def test_status_shows_where_a_run_waits_and_cancel_takes_it_out_everywhere(
    queued: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = queued
    now = state(run)
    assert (now.status, now.alive) == ("waiting", True)
    assert "a100x4: job 1 is pending" in now.explanation and "h100x8: job 2 is pending" in now.explanation
    assert main(["status", run.id]) == 0 and "the first job that starts takes it" in capsys.readouterr().out
    assert main(["requeue", run.id]) != 0 and main(["preempt", run.id]) != 0
    assert main(["cluster=a100x4", "submit", "--after", run.id]) != 0
    assert main(["cancel", run.id]) == 0
    assert {line.split()[1] for line in (slurm.directory / "jobs").read_text().splitlines()} == {"CANCELLED"}
    now = state(run)
    assert (now.status, now.alive) == ("stopped", False)


def test_a_job_that_starts_while_the_run_is_cancelled_leaves(run: RunDir) -> None:
    write_request(run, RunAction.CANCEL)
    slurm = Slurm(run, j1="PENDING", j2="RUNNING")
    assert not starts(run, "h100x8", "2", slurm)
    assert slurm.cancelled == ["1"] and is_open(run)


def test_resume_of_a_run_that_was_cancelled_while_it_waited_submits_it_to_each_again(
    queued: RunDir, slurm: FakeSlurm
) -> None:
    run = queued
    assert starts(run, "h100x8", "2", Slurm(run, j2="RUNNING"))
    run.update_info(job_ids=[])  # as if it had died before it noted its job
    assert main(["cancel", run.id]) == 0 and main(["resume", run.id]) == 0
    assert [choice.job_id for choice in choices_of(run)] == ["3", "4"] and claim_of(run) is None
    assert state(run).status == "waiting"
    assert starts(run, "a100x4", "3", Slurm(run, j3="RUNNING", j4="PENDING"))


def test_when_the_first_has_started_it_is_a_run_like_any_other(queued: RunDir, slurm: FakeSlurm) -> None:
    run = queued
    assert starts(run, "h100x8", "2", Slurm(run, j1="PENDING", j2="RUNNING"))
    assert main(["cancel", run.id]) == 0
    assert (slurm.directory / "jobs").read_text().count("CANCELLED") == 2  # the one that was not taken back, too
    assert main(["resume", run.id]) == 0
    assert len(slurm.submitted) == 3 and slurm.submitted[-1] == run.script.read_text()


def test_a_choice_that_refuses_is_left_out_with_a_sentence(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (slurm.directory / "sbatch").read_text()
    refuse = 'grep -q a100 "${!#}" && { echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1; }\n'
    slurm.command("sbatch", refuse + whole.partition("\n")[2].partition("\n")[2])
    assert main([*TO_TWO, "submit"]) == 0
    said = capsys.readouterr()
    assert "to h100x8 as job 1; the first that starts takes it" in said.out
    assert "not submitted to a100x4" in said.err
    slurm.refuse("sbatch: error: invalid partition specified: gpu")
    before = len(lookup.all_runs(project / "runs"))
    assert main([*TO_TWO, "submit"]) != 0
    assert len(lookup.all_runs(project / "runs")) == before


def describe(project: Path, name: str, *lines: str) -> list[str]:
    """Write a cluster file that is a100x4 with these lines besides, and return the option by which it is found."""
    folder = project / "my_conf" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text("\n".join(["defaults: [a100x4]", *lines]) + "\n")
    return ["--config-dir", str(project / "my_conf")]


def test_a_choice_that_does_not_suit_is_left_out_and_the_run_goes_to_the_others(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its slurm.conf is not there, its nodes are too small for the model, its controller is silent, its fields are wrong."""
    slurm.command("scontrol", '[ "$SLURM_CONF" != "$here/silent.conf" ] || exit 1')
    whole = (slurm.directory / "sbatch").read_text().partition("\n")[2]
    silent = 'if [ "$SLURM_CONF" = "$here/silent.conf" ]; then echo "sbatch: error: Invalid user id" >&2; exit 1; fi\n'
    slurm.command("sbatch", silent + whole.partition("\n")[2])
    for name in ("silent", "fine"):
        (slurm.directory / f"{name}.conf").touch()
    option = describe(project, "gone", f"slurm_conf: {project}/nowhere.conf")
    describe(project, "silent", f"slurm_conf: {slurm.directory}/silent.conf")
    describe(project, "wrong", "slurm_conf: null", "time_limit_min: -1")
    describe(project, "fine", f"slurm_conf: {slurm.directory}/fine.conf")
    words = [*option, "cluster=first", "train.steps=50"]
    assert main([*words, "cluster.choices=[gone,silent,wrong,fine]", "submit", "--json"]) == 0
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert said["choices"] == {"fine": "1"} and said["left_out"].keys() == {"gone", "silent", "wrong"}
    assert f"gone is left out: cluster.slurm_conf={project}/nowhere.conf is not a file" in told.err
    assert "time_limit_min" in said["left_out"]["wrong"] and "wrong is left out" in told.err
    assert RunDir(Path(said["path"])).config_values()["cluster"]["slurm_conf"].endswith(".conf")
    assert main([*words, "cluster.choices=[gone,wrong,fine]", "submit", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert "### fine" in told.out and "wrong is left out" in told.err
    before = len(lookup.all_runs(project / "runs"))
    assert main([*words, "cluster.choices=[gone,wrong]", "submit"]) == 78
    told = capsys.readouterr()
    assert "none of cluster.choices suits: " in told.err and "nowhere.conf" in told.err and "time_limit" in told.err
    assert main([*TO_TWO, "train.steps=-1", "submit"]) == 78
    assert capsys.readouterr().err.count("train.steps") == 1
    assert len(lookup.all_runs(project / "runs")) == before


def test_a_choice_of_which_it_is_not_known_whether_it_has_the_job_keeps_it_from_no_other(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(script: str, folder: Path, token: str, *rest: object, **options: object) -> str:
        if token.endswith(".a100x4"):
            raise ClusterError("it is not known whether the job was submitted: no answer")
        return submit_exactly_once(script, folder, token, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(submit_first, "submit_exactly_once", silent)
    assert main([*TO_TWO, "submit", "--json"]) == 0
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert said["choices"] == {"h100x8": "1"} and said["unknown"].keys() == {"a100x4"}
    assert "a100x4: it is not known whether" in told.err
    run = RunDir(Path(said["path"]))
    assert [choice.token for choice in choices_of(run)] == [f"{run.id}:first0.{name}" for name in ("a100x4", "h100x8")]
    slurm.refuse("sbatch: error: invalid partition specified: gpu")
    before = len(lookup.all_runs(project / "runs"))
    assert main([*TO_TWO, "submit"]) == 1
    assert "it is not known whether" in capsys.readouterr().err
    assert len(lookup.all_runs(project / "runs")) == before + 1  # there may be a job that needs it


def test_a_disk_that_is_full_after_the_first_job_leaves_no_job_that_is_not_found(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Choice.write

    def full(choice: Choice) -> None:
        if choice.job_id is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(choice)

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(Choice, "write", full)
        assert main([*TO_TWO, "submit"]) != 0
    assert "may be queued on some clusters" in capsys.readouterr().err
    (run,) = lookup.all_runs(project / "runs")
    assert state(run).status == "waiting" and "a100x4: job 1 is pending" in state(run).explanation
    assert main(["cancel", run.id]) == 0
    assert "1 CANCELLED" in (slurm.directory / "jobs").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=first", "submit"], "cluster=first names no clusters"),
        (["+cluster=first", "plan"], "cluster=first names no clusters"),
        ([*TO_TWO, "layout"], "is for `submit` of one run"),
        ([*TO_TWO, "-m", "optim.lr=1e-3,1e-4", "submit"], "is for `submit` of one run"),
        ([*TO_TWO, "render"], "render works with one cluster"),
        ([*TO_TWO, "requeue=chain", "submit"], "a chain belongs to one cluster"),
        ([*TO_TWO, "job.singleton=true", "submit"], "would wait for each other"),
        (["cluster=first", "cluster.choices=[a100x4,local]", "submit"], "which has no queue"),
        (["cluster=first", "cluster.choices=[a100x4,local]", "submit", "--dry-run"], "which has no queue"),
        (["cluster=first", "cluster.choices=[a100x4,first]", "submit", "--dry-run"], "'first' is not a cluster"),
        (["cluster=first", "cluster.choices=[a100x4,a100x4]", "submit"], "there twice"),
        (["cluster=first", "cluster.choices=[a100x4,../x]", "submit"], "is no name"),
        (["cluster=first", "cluster.choices=[a100x4,nowhere]", "submit"], "nowhere"),
    ],
)
def test_what_cannot_go_to_several_clusters_is_refused_with_a_sentence(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) != 0
    assert said in capsys.readouterr().err
    assert not slurm.submitted and not list(project.glob("runs/*/*"))


def test_a_cluster_file_that_is_named_like_a_claim_is_refused() -> None:
    with pytest.raises(ConfigError, match="taken-0001 is a name that the run directory needs"):
        submit_first.refuse_unsuitable({"taken-0001": compose(["cluster=a100x4"])})


def test_a_dry_run_prints_the_script_of_each(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TO_TWO, "submit", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("###")] == ["### a100x4", "### h100x8"]
    assert "a100:4" in text and "h100:8" in text and not (project / "runs").exists()


def test_records_of_choices_that_somebody_else_wrote_are_not_followed(run: RunDir, edit: Callable[..., None]) -> None:
    edit(run.choices / "h100x8" / "choice.json", slurm_conf=7)
    assert states_of(run) == "unreadable"


def states_of(run: RunDir) -> str:
    return str(look.states([run])[run.id].status)


@pytest.fixture
def edit() -> Callable[..., None]:
    def change(path: Path, **values: object) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change
