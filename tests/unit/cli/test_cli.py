"""The command line: what a person may type, and what is said when it cannot be understood."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slurmtrain import __version__
from slurmtrain.cli import main
from slurmtrain.cli.arguments import parse, visible_verbs
from slurmtrain.cli.help import topics
from slurmtrain.cli.sandbox import OF_SPEC
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.folders import PACKAGE, config_groups, shipped
from slurmtrain.config.overrides import normalise
from slurmtrain.sandbox import SandboxSpec
from tests.support.commands import Cli, refusal
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, shown

VISIBLE_VERBS = visible_verbs()
# Every verb, and every action of one, as the words after which its options are typed.
TREE = [
    (name, *(["last"] if name == "checkpoints" and action else []), *([action] if action else []))
    for name in VISIBLE_VERBS
    for action in (None, *VERBS[name].actions)
]


# What may be typed.


def test_the_output_file_of_render_may_be_called_like_a_verb(project: Path) -> None:
    printed("-o", "status", "render", "+cluster=a100x4")
    assert (project / "status").read_text().startswith("#!/bin/bash")


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "--dry-run", "+cluster=a100x4", "cluster.nodes=2"],
        ["+cluster=a100x4", "--dry-run", "submit", "cluster.nodes=2"],
        ["--dry-run", "cluster.nodes=2", "+cluster=a100x4", "submit"],
        ["cluster=a100x4", "cluster.nodes=2", "submit", "--dry-run"],
        ["render", "cluster.nodes=2", "cluster=a100x4"],
    ],
)
def test_any_order_and_cluster_with_or_without_plus_mean_the_same(words: list[str], project: Path) -> None:
    script = printed(*words)
    assert script == printed("cluster=a100x4", "submit", "cluster.nodes=2", "--dry-run")
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --gpus-per-node=a100:4\n" in script


def test_a_dry_run_says_beside_the_script_how_large_the_job_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", "+cluster=a100x4", "cluster.nodes=2-4"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash") and "this job has 2-4 nodes x 4 ranks, 4 GPUs on each\n" in shown.err


def test_plus_tilde_and_double_plus_add_remove_and_override(project: Path) -> None:
    words = ["+cluster.env.A=1", "++cluster.env.B=2", "++cluster.nodes=4", "~data.max_bytes"]
    script = printed("submit", "--dry-run", "cluster=a100x4", *words)
    assert "export A=1\n" in script and "export B=2\n" in script and "#SBATCH --nodes=4\n" in script


def test_cfg_job_prints_the_composed_config_with_and_without_a_verb(cli: Cli) -> None:
    plain = cli("--cfg", "job", "+cluster=h100x8", "train.steps=7")
    assert plain.returncode == 0, plain.stderr
    assert "gpu_type: h100" in plain.stdout and "steps: 7" in plain.stdout and "betas:" in plain.stdout
    among = cli("+cluster=h100x8", "submit", "--cfg", "job", "train.steps=7")
    assert among.stdout == plain.stdout


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
    assert cli("submit", "--dry-run", "cluster=mine", "-cn", "status", "-cd", "resume").returncode == 0
    refused = cli("--config-dir", "resume", "--cfg", "job", "optim.lrr=1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "slurmtrain: error: optim has no field 'lrr' (in 'optim.lrr=1')\n  hint: did you mean optim.lr?\n"
    )


@pytest.mark.parametrize("absolute", [False, True])
def test_own_configs_with_a_primary_one_are_searched_first_and_the_shipped_ones_after_them(
    absolute: bool, cli: Cli, project: Path
) -> None:
    own = project / "it's, mine"
    (own / "model").mkdir(parents=True)
    (own / "model/tiny.yaml").write_text("_target_: my_models.Shadow\n")
    groups = "{cluster: a100x4}, {model: tiny}, {data: stdlib}, {job: train}"
    (own / "config.yaml").write_text(f"defaults: [schema, {groups}, _self_]\ntrain: {{steps: 31}}\n")
    path = ("--config-dir", str(own) if absolute else own.name)
    answer = cli(*path, "--cfg", "job")
    assert "_target_: my_models.Shadow" in answer.stdout and "steps: 31" in answer.stdout, answer
    assert "partition: null" in answer.stdout and "dim: 96" in cli(*path, "--cfg", "job", "model=small").stdout
    assert "#SBATCH --gpus-per-node=a100:4\n" in cli("render", *path).stdout
    assert cli("render", *path, "-o", "job.sbatch").returncode == 0
    frozen = next(project.glob("runs/train/*/config.yaml")).read_text()
    assert "_target_: my_models.Shadow" in frozen and "steps: 31" in frozen


def test_own_configs_have_the_nearest_names_too(project: Path) -> None:
    (project / "cluster").mkdir()
    (project / "cluster/jupiter.yaml").write_text("nodes: 1\n")
    (project / "mine.yaml").write_text("defaults: [config, _self_]\ntrain: {stepz: 31}\n")
    said = refusal("submit", "--config-dir", ".", "-cn", "mine")
    assert "train has no field 'stepz'" in said and "did you mean train.steps" in said
    assert "did you mean jupiter" in refusal("submit", "cluster=jupitr", "--config-dir", ".")


def test_every_shipped_group_is_in_the_defaults_list_so_that_a_plus_before_it_may_be_dropped() -> None:
    defaults = yaml.safe_load((shipped("conf") / "config.yaml").read_text())["defaults"]
    assert {group for entry in defaults if isinstance(entry, dict) for group in entry} == set(config_groups())
    assert [normalise(f"+{group}=x") for group in config_groups()] == [f"{group}=x" for group in config_groups()]
    assert [normalise(word) for word in ("+model.x=1", "++model=x", "+mine=x")] == [
        "+model.x=1",
        "++model=x",
        "+mine=x",
    ]


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


def test_a_page_on_a_terminal_is_rendered_through_the_pager(project: Path) -> None:
    pager = project / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {project}/paged\n")
    pager.chmod(0o755)
    command = shlex.join([sys.executable, "-m", "slurmtrain", "help", "quickstart"])
    environment = {**os.environ, "PAGER": str(pager), "TERM": "xterm", "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run(
        ["script", "-qec", command, "/dev/null"], env=environment, check=True, capture_output=True, timeout=60
    )
    paged = (project / "paged").read_text()
    assert "\x1b[" in paged and "Quickstart" in paged and "\n# Quickstart" not in paged
    assert "](" not in paged  # links are the commands that show a page


def test_the_console_script_is_the_same_thing(cli: Cli, project: Path) -> None:
    assert cli("--version").stdout == f"slurmtrain {__version__}\n"
    script = Path(sys.executable).parent / "slurmtrain"
    for words in (["--help"], ["submt"], ["submit", "--dry-run", "cluster=a100x4"]):
        ours = cli(*words)
        theirs = subprocess.run([script, *words], cwd=project, capture_output=True, text=True, check=False)
        assert (theirs.returncode, theirs.stderr) == (ours.returncode, ours.stderr)
        # Its first line may name the same interpreter differently (python, python3).
        same = [re.sub(r"/bin/python[\d.]* ", "/bin/python ", done.stdout) for done in (theirs, ours)]
        assert same[0] == same[1]


# Ctrl-C when a module begins to load, or at the end of the interpreter.
INTERRUPTED = """
import atexit, os, runpy, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
if {at!r} == "exit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv = ["slurmtrain", *{words!r}]
runpy.run_module("slurmtrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["--help"], "slurmtrain.cli"),
        (["submit", "--help"], "argparse"),
        (["--help"], "slurmtrain.cli.help"),
        (["--help"], "exit"),
        (["status"], "slurmtrain.report.status.look"),
        (["submit", "--dry-run"], "jinja2"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_ctrl_c_while_a_verb_loads_is_silent(words: list[str], at: str, project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(at=at, words=words)], cwd=project, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("slurmtrain cluster=", {"cluster=a100x4", "cluster=local", "cluster=sandbox"}),
        ("slurmtrain submit cluster=a", {"cluster=a100x4", "cluster=a100x8"}),
        ("slurmtrain +cluster=", {"+cluster=a100x4", "+cluster=local", "+cluster=sandbox"}),
        ("slurmtrain submit +cluster=a100x4 mod", {"model="}),
        ("slurmtrain submit --dr", {"--dry-run"}),
        ("slurmtrain status ", {"last", "--json"}),
        ("slurmtrain sweep re", {"retry"}),
        ("slurmtrain help che", {"checkpoints"}),
        ("slurmtrain checkpoints last ve", {"verify"}),
        ("slurmtrain cluster=a100x4 submit train.st", {"train.steps="}),
        ("slurmtrain su", {"submit"}),
        ("slurmtrain +cluster=local drill la", {"last"}),
        ("slurmtrain drill --st", {"--steps", "--stop-at"}),
        ("slurmtrain re", {"render", "requeue", "resume", "requeue="}),
        ("slurmtrain requeue.mode=r", {"requeue.mode=requeue", "requeue.mode=resubmit"}),
    ],
)
def test_tab_completes_verbs_groups_options_and_fields(line: str, offered: set[str], cli: Cli) -> None:
    # As the shell function that `-sc install=bash` prints calls it.
    answer = cli("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert offered <= set(answer.stdout.split()), answer


@pytest.mark.parametrize("words", TREE, ids=" ".join)
def test_tab_offers_every_option_that_the_help_shows_and_argparse_takes(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "--help"])
    section = capsys.readouterr().out.partition("\noptions:\n")[2].partition("\nexamples:")[0]
    explained = set(re.findall(r"(?:^  |, )(--?[a-z][\w-]*)", section, re.MULTILINE))
    monkeypatch.setenv("COMP_LINE", f"slurmtrain {' '.join(words)} -")
    main(["-sc", "query=bash"])
    offered = set(capsys.readouterr().out.split())
    assert explained - {"-h"} <= offered
    assert offered - {"--json"} <= explained | {"--json"}


def test_tab_offers_the_values_of_an_option(cli: Cli) -> None:
    for line, offered in (
        ("slurmtrain usage --by ", ["run", "user"]),
        ("slurmtrain checkpoints last export out --dtype b", ["bfloat16"]),
        ("slurmtrain +cluster=a100x4 submit --after ", ["last"]),
        ("slurmtrain probe --out ", []),
    ):
        assert cli("-sc", "query=bash", COMP_LINE=line).stdout.split() == offered, line


def test_the_sizes_of_a_sandbox_that_the_help_names_are_its_own() -> None:
    asked = parse(["sandbox", "up"])
    assert {name: getattr(asked, name) for name in OF_SPEC} == {name: vars(SandboxSpec())[name] for name in OF_SPEC}


def test_tab_completes_the_ids_of_runs(cli: Cli, project: Path) -> None:
    for name in ("20260101-000000-aaaaa", "20260202-000000-bbbbb"):
        (project / "runs/train" / name).mkdir(parents=True)
        (project / "runs/train" / name / "run.json").write_text("{}")
    answer = cli("-sc", "query=bash", COMP_LINE="slurmtrain logs 202602", COMP_POINT="22")
    assert answer.stdout.split() == ["20260202-000000-bbbbb"]


def completed_by_bash(cli: Cli, typed: str) -> str:
    """What bash itself offers for the last word of a line."""
    installed = cli("-sc", "install=bash").stdout
    line = f"COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_CWORD={typed.count(' ')}"
    script = f"{installed}\n{line}\n_slurmtrain slurmtrain\necho ${{COMPREPLY[@]}}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stderr == "", done
    return done.stdout


def test_bash_itself_completes_a_group_with_a_plus(cli: Cli, project: Path) -> None:
    assert completed_by_bash(cli, "slurmtrain +cluster=h") == "h100x8\n"


@pytest.mark.parametrize(
    ("typed", "planted", "offered"),
    [
        ("slurmtrain logs ", "runs/train/2026-$(touch${IFS}ran)/run.json", "last"),
        ("slurmtrain logs ", "runs/train/--host=elsewhere/run.json", "last"),
    ],
)
def test_tab_runs_nothing_that_somebody_has_put_into_a_name(
    typed: str, planted: str, offered: str, cli: Cli, project: Path
) -> None:
    """Bash expands the words that it is given to choose from."""
    (project / planted).parent.mkdir(parents=True, exist_ok=True)
    (project / planted).write_text("{}")
    words = completed_by_bash(cli, typed).split()
    assert offered in words
    assert not (project / "ran").exists() and not any("2026" in word or "--host" in word for word in words)


# What cannot be understood: exit code 2, one sentence, a hint, no traceback.


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        ([], "no verb given", "submit, render, train, status"),
        (["train.steps=3"], "no verb given", "--help"),
        (["submt"], "there is no verb 'submt'", "submit"),
        (["submt", "--", "python", "x.py"], "there is no verb 'submt'", "did you mean submit"),
        (["submit", "xyz"], "cannot read 'xyz'", "known are"),
        (["submit", "train.stepz=3"], "train has no field 'stepz'", "did you mean train.steps"),
        (["submit", "trian.steps=3"], "there is no config key 'trian'", "did you mean train"),
        (["submit", "+cluster.node=3"], "cluster has no field 'node'", "did you mean cluster.nodes or "),
        (
            ["submit", "cluster.container.imag=x"],
            "cluster.container has no field 'imag'",
            "cluster.container.image",
        ),
        (["submit", "cluster=a100"], "there is no cluster called 'a100'", "a100x4"),
        (["submit", "+cluster=lokal"], "there is no cluster called 'lokal'", "did you mean local"),
        (["submit", "hydra/sweeper=optunaa"], "there is no hydra/sweeper called 'optunaa'", "did you mean optuna?"),
        (
            ["submit", "hydra/sweeper/sampler=tpee"],
            "there is no hydra/sweeper/sampler called 'tpee'",
            "did you mean tpe?",
        ),
        (["submit", "+experiment=smok"], "there is no experiment called 'smok'", "did you mean smoke"),
        (["--dryrun", "submit"], "there is no option '--dryrun'", "--dry-run"),
        (["nodes", "--cluster", "c"], "there is no option '--cluster'", "nodes --help shows what it takes"),
        (["status", "--jsn"], "there is no option '--jsn'", "--json"),
        (["sandbox", "upp"], "'upp' is not one of up|down|status|env", "did you mean up"),
        (["runs"], "runs needs one of compare|prune", "runs --help"),
        (["logs"], "required: RUN", "logs"),
        (["help", "sekrets"], "there is no topic 'sekrets'", "did you mean secrets"),
        (["submit", "--config-name"], "--config-name needs a value", ""),
        (
            ["submit", "model.layrs=3"],
            "model has no key 'layrs'",
            "did you mean model.n_layers? (+model.layrs=3 adds it)",
        ),
        (["submit", "model=tiny", "+model.a.b=1", "model.a.c=2"], "model.a has no key 'c'", "known are: b"),
        (["submit", "model.optm.lr=3"], "model has no key 'optm'", "+model.optm.lr=3 adds it"),
        (["submit", "~model.layrs"], "model has no key 'layrs'", "did you mean model.n_layers?"),
        (["submit", "cluster.env.A=1"], "cluster.env has no key 'A'", "write +cluster.env.A=1"),
        (["submit", "--config-dir", "nowhere"], "there is no such folder", ""),
        (["--config-dir", "nowhere", "--cfg", "job"], "--config-dir nowhere: there is no such folder", ""),
        (["submit", "-cn", "nothing"], "nothing", ""),
        (["--cfg", "jb"], "'jb' is not a value of --cfg", "did you mean job"),
        (["submit", "=3"], "cannot read the override '=3'", "key=value"),
        (["submit", "job.name=it's"], "in which a quote does not end", "it is typed \"job.name='it\\'s'\""),
        (["submit", 'cluster.account=a"b'], "in which a quote does not end", "it is typed 'cluster.account="),
        (["submit", "cluster.container.image=a#b"], "cannot read the override 'cluster.container.image=a#b'", "quote"),
        (["submit", "cluster=3"], "there is no cluster called '3'", ""),
        (["--multirun", "render", "train.steps=1,2"], "works with submit", "-m"),
    ],
)
def test_what_cannot_be_understood_gets_one_sentence_and_the_nearest_name(
    words: list[str], sentence: str, hint: str, project: Path
) -> None:
    first, *rest = refusal(*words).splitlines()
    assert first.startswith("slurmtrain: error: ") and sentence in first
    assert len(rest) <= 1 and hint in "".join(rest)
    assert list(project.iterdir()) == []


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
        *(
            (line.split(), "torch,numpy,submitit,rich")
            for line in ("submit --dry-run cluster=a100x4", "render cluster=a100x4")
        ),
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


def test_a_rendered_run_remembers_which_slurm_it_is_for(project: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("")
    for words, known in [
        ([f"cluster.slurm_conf={tmp_path}/slurm.conf", "+cluster=a100x4"], f"{tmp_path}/slurm.conf"),
        (["+cluster=sandbox", "cluster.sandbox=surely-not-there"], None),
        (["+cluster=a100x4"], None),
    ]:
        printed("render", "-o", "job.sbatch", *words)
        newest = max(project.glob("runs/train/*"), key=lambda path: path.stat().st_mtime_ns)
        assert json.loads((newest / "run.json").read_text())["slurm_conf"] == known


def test_status_of_a_submitted_run_says_its_job_even_without_a_controller(project: Path, slurm: FakeSlurm) -> None:
    for name in ("squeue", "scontrol"):
        slurm.fail(name)
    assert "as job 101" in printed("+cluster=a100x4", "submit")
    run_dir = next(project.glob("runs/train/*"))
    assert json.loads((run_dir / "run.json").read_text())["job_ids"] == ["101"]
    assert os.stat(run_dir).st_mode & 0o777 == 0o700
