"""The command line: what a person may type, and what is said when it cannot be understood."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slurmtrain.cli import main
from slurmtrain.cli.arguments import parse, visible_verbs
from slurmtrain.cli.help import topics
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.folders import PACKAGE, config_groups, shipped
from slurmtrain.config.overrides import normalise
from tests.support.commands import Cli, refusal
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, shown

VISIBLE_VERBS = visible_verbs()


# What may be typed.


@pytest.mark.parametrize(
    "words",
    [
        ["+cluster=a100x4", "--dry-run", "submit", "cluster.nodes=2"],
        ["--dry-run", "cluster.nodes=2", "+cluster=a100x4", "submit"],
        ["render", "cluster.nodes=2", "cluster=a100x4"],
    ],
)
def test_any_order_and_cluster_with_or_without_plus_mean_the_same(words: list[str], project: Path) -> None:
    script = printed(*words)
    assert script == printed("cluster=a100x4", "submit", "cluster.nodes=2", "--dry-run")
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --gpus-per-node=a100:4\n" in script


def test_plus_tilde_and_double_plus_add_remove_and_override(project: Path) -> None:
    words = ["+cluster.env.A=1", "++cluster.env.B=2", "++cluster.nodes=4", "~data.max_bytes"]
    script = printed("submit", "--dry-run", "cluster=a100x4", *words)
    assert "export A=1\n" in script and "export B=2\n" in script and "#SBATCH --nodes=4\n" in script


def test_a_config_dir_brings_clusters_models_and_a_primary_config(cli: Cli, project: Path) -> None:
    own = project / "resume"  # a value that looks like a verb is a value
    for name, text in {
        "cluster/mine.yaml": "partition: my-gpus\nnodes: 2\ntasks_per_node: 4\ngpus_per_node: 4\n",
        "model/net.yaml": "_target_: my_models.Net\nwidth: 5\n",
        "status.yaml": "defaults: [config, _self_]\ntrain: {steps: 31}\n",
    }.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    answer = cli("submit", "--dry-run", "+cluster=mine", "model=net", "--config-dir", "resume")
    assert answer.returncode == 0, answer.stderr
    assert "#SBATCH --partition=my-gpus\n" in answer.stdout
    config = cli("--config-dir", "resume", "-cn", "status", "--cfg", "job", "model=net", "cluster=mine")
    assert config.returncode == 0, config.stderr
    assert "_target_: my_models.Net" in config.stdout and "steps: 31" in config.stdout
    refused = cli("--config-dir", "resume", "--cfg", "job", "optim.lrr=1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "slurmtrain: error: optim has no field 'lrr' (in 'optim.lrr=1')\n  hint: did you mean optim.lr?\n"
    )


def test_every_shipped_group_is_in_the_defaults_list_so_that_a_plus_before_it_may_be_dropped() -> None:
    defaults = yaml.safe_load((shipped("conf") / "config.yaml").read_text())["defaults"]
    assert {group for entry in defaults if isinstance(entry, dict) for group in entry} == set(config_groups())
    assert [normalise(f"+{group}=x") for group in config_groups()] == [f"{group}=x" for group in config_groups()]
    others = ["+model.x=1", "++model=x", "+mine=x"]
    assert [normalise(word) for word in others] == others


# Help, version, completion.


def test_help_names_every_verb_and_every_option_of_every_group(cli: Cli) -> None:
    text = cli("--help").stdout
    for verb in VISIBLE_VERBS:
        assert re.search(rf"\n  {verb} +{re.escape(VERBS[verb].summary)}\n", text)
    assert "python -m slurmtrain help [TOPIC]" in text
    for group, names in config_groups().items():
        lines = text.partition(f"\n  {group}=")[2].partition("=")[0]
        assert set(names) <= set(lines.split())
    assert cli("-h").stdout == text


@pytest.mark.parametrize("verb", VISIBLE_VERBS)
def test_the_help_of_every_verb_shows_its_usage_its_flags_and_examples_that_can_be_typed(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        main([verb, "--help"])
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("usage: python -m slurmtrain") and verb in shown.out.partition("\n\n")[0]
    assert verb == "help" or VERBS[verb].topic in topics()
    examples = shown.out.partition("\nexamples:")[2].replace("\\\n", "")
    lines = re.findall(r"^  (?:python -m )?slurmtrain (.*)$", examples, re.MULTILINE)
    assert lines or verb == "help"
    for line in lines:
        assert parse(shlex.split(line, comments=True)).verb == verb
    assert max(map(len, shown.out.splitlines())) <= 140


def test_help_lists_the_topics_with_a_line_each_and_a_page_that_is_piped_is_the_markdown_itself(cli: Cli) -> None:
    answer = cli("help").stdout
    assert set(topics()) == {page.stem for page in (PACKAGE / "docs").glob("*.md")}
    for name, subject in topics().items():
        assert subject and re.search(rf"\n  {name} +{re.escape(subject)}\n", answer)
    assert cli("help", "requeue").stdout == (PACKAGE / "docs" / "requeue.md").read_text()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("slurmtrain cluster=", {"cluster=a100x4", "cluster=local", "cluster=sandbox"}),
        ("slurmtrain submit cluster=a", {"cluster=a100x4", "cluster=a100x8"}),
        ("slurmtrain submit --dr", {"--dry-run"}),
        ("slurmtrain status ", {"last", "--json"}),
        ("slurmtrain sweep re", {"retry"}),
        ("slurmtrain cluster=a100x4 submit train.st", {"train.steps="}),
        ("slurmtrain drill --st", {"--steps", "--stop-at"}),
        ("slurmtrain re", {"render", "requeue", "resume", "requeue="}),
        ("slurmtrain requeue.mode=r", {"requeue.mode=requeue", "requeue.mode=resubmit"}),
    ],
)
def test_tab_completes_verbs_groups_options_and_fields(line: str, offered: set[str], cli: Cli) -> None:
    # As the shell function that `-sc install=bash` prints calls it.
    answer = cli("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert offered <= set(answer.stdout.split()), answer


def test_tab_offers_the_values_of_an_option(cli: Cli) -> None:
    for line, offered in (
        ("slurmtrain usage --by ", ["run", "user"]),
        ("slurmtrain checkpoints last export out --dtype b", ["bfloat16"]),
        ("slurmtrain +cluster=a100x4 submit --after ", ["last"]),
        ("slurmtrain probe --out ", []),
    ):
        assert cli("-sc", "query=bash", COMP_LINE=line).stdout.split() == offered, line


def completed_by_bash(cli: Cli, typed: str) -> str:
    """What bash itself offers for the last word of a line."""
    installed = cli("-sc", "install=bash").stdout
    line = f"COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_CWORD={typed.count(' ')}"
    script = f"{installed}\n{line}\n_slurmtrain slurmtrain\necho ${{COMPREPLY[@]}}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {**os.environ, "PATH": path}
    done = subprocess.run(["bash", "-c", script], env=own, capture_output=True, text=True, check=False)
    assert done.stderr == "", done
    return done.stdout


def test_bash_itself_completes_a_group_with_a_plus(cli: Cli, project: Path) -> None:
    assert completed_by_bash(cli, "slurmtrain +cluster=h") == "h100x8\n"


def test_tab_runs_nothing_that_somebody_has_put_into_a_name(cli: Cli, project: Path) -> None:
    """Bash expands the words that it is given to choose from."""
    planted = project / "runs/train/2026-$(touch${IFS}ran)/run.json"
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text("{}")
    words = completed_by_bash(cli, "slurmtrain logs ").split()
    assert "last" in words and not (project / "ran").exists() and not any("2026" in word for word in words)


def test_a_reader_that_leaves_early_is_no_error(cli: Cli, project: Path) -> None:
    command = f"{sys.executable} -m slurmtrain --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr


# What is imported: a login node must answer at once.

REPORT = """
import sys
from slurmtrain.cli import arguments, main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
heavy = [name for name in sys.argv[1].split(",") if name in sys.modules]
print("\\nHEAVY", code, ",".join(heavy))
"""


OF_HELP = "torch,numpy,submitit,hydra,omegaconf,rich,jinja2,yaml,logging"
OF_STATUS = "torch,numpy,submitit,hydra,omegaconf"


@pytest.mark.parametrize(
    ("words", "not_imported"),
    [
        *((line.split(), OF_HELP) for line in ("--help", "help", "help requeue", "--version", "submt")),
        (["submit", "--dry-run", "cluster=a100x4"], "torch,numpy,submitit,rich"),
        (["render", "cluster=a100x4"], "torch,numpy,submitit,rich"),
        *((line.split(), OF_STATUS) for line in ("status", "status last", "runs prune --dry-run")),
        (["status", "--json"], f"{OF_STATUS},rich"),
        (["runs", "compare", "last", "last"], f"{OF_STATUS},pyarrow,matplotlib"),
        (["checkpoints", "last", "prune"], "torch,submitit,hydra,omegaconf"),
        (["plan", "cluster=h100x8", "model=llama3_8b", "parallel=fsdp"], "torch,numpy,submitit"),
        (["supervise", "RUN", "--set-up-failed", "no module"], "torch,numpy,submitit,hydra"),
    ],
    ids=lambda value: value[0] + str(len(value)) if isinstance(value, list) else "",
)
def test_a_verb_imports_only_what_it_needs(
    words: list[str], not_imported: str, cli: Cli, project: Path, slurm: FakeSlurm
) -> None:
    printed("render", "+cluster=a100x4", "-o", "job.sbatch")
    run_dir = next(project.glob("runs/train/*"))
    (run_dir / "attempts" / "0001").mkdir()
    words = [str(run_dir) if word == "RUN" else word for word in words]
    done = cli(not_imported, *words, program=("-c", REPORT))
    expected = {"submt": 2, "supervise": 78}.get(words[0], 0)
    assert done.stdout.splitlines()[-1] == f"HEAVY {expected} ", done


# Where runs are.


def test_the_verbs_look_where_slurmtrain_runs_says_and_submit_puts_runs_there(
    project: Path, tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed("render", "+cluster=a100x4", "-o", "job.sbatch", f"job.runs_dir={tmp_path}/elsewhere")
    refusal("status", "last")
    monkeypatch.setenv("SLURMTRAIN_RUNS", f"{tmp_path}/elsewhere")
    assert "prepared" in printed("status", "last")
    printed("+cluster=a100x4", "submit")
    assert len(shown("status")) == 2 and [path.name for path in project.iterdir()] == ["job.sbatch"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_next_steps_that_submit_prints_work_as_they_are(
    elsewhere: bool, project: Path, tmp_path: Path, slurm: FakeSlurm
) -> None:
    words = [f"job.runs_dir={tmp_path}/elsewhere"] if elsewhere else []
    said = printed("+cluster=a100x4", "submit", *words)
    assert "as job 101: 1 node x 4 ranks, 4 GPUs on each\n" in said
    steps = re.findall(r"^  python -m slurmtrain (.*)$", said, re.MULTILINE)
    assert [step.split()[0] for step in steps] == ["status", "logs", "cancel"]
    status = shlex.split(steps[0])
    assert Path(status[1]).is_absolute() is elsewhere
    printed(*status)
