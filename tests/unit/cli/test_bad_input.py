"""Every bad value gets its sentence and its exit code, before anything is submitted or left behind."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.errors import EXIT_CONFIG, EXIT_USAGE
from tests.support.fake_slurm import FakeSlurm
from tests.support.tables import cells_of, words_of

SLURM = ["+cluster=a100x4", "submit"]
LOCAL = ["+cluster=local", "submit"]
SEARCH = ["-m", "hydra/sweeper=optuna", "optim.lr=interval(1,2)", "submit"]
# Overrides with two blanks between them -> a part of the sentence -> of the hint. On the cluster a100x4, unless one is named.
TABLE = r"""
job.name='a b'  ->  job.name='a b' is not  ->  folder
job.name='$(touch x)'  ->  job.name='$(touch x)' is not  ->  folder
job.name=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx  ->  at most 64  ->  folder
job.kind=trian  ->  job.kind=trian is not known  ->  train, command
cluster.time_limit_min=5  cluster.signal_lead_s=240  ->  cluster.signal_lead_s=240 need more time  ->  leave cluster.time
cluster.mem_per_cpu_gb=2  ->  mem_per_node_gb=480 and cluster.mem_per_cpu_gb=2 exclude  ->  null
+cluster=local  cluster.mem_per_gpu_gb=2  ->  mem_per_gpu_gb=2 needs cluster.gpus_per_node  ->  leave
cluster.gpus_per_node=0  ->  cluster.gpu_type=a100 need cluster.gpus_per_node  ->  leave cluster.gpu_memory_gb
cluster.tasks_per_node=8  ->  tasks_per_node=8 needs as many cluster.gpus_per_node  ->  leave cluster.tasks
cluster.nodes=0  ->  cluster.nodes=0 must be at least 1
cluster.nodes=many  ->  cluster.nodes='many' is not a number of nodes  ->  cluster.nodes=
cluster.nodes=4-2  ->  cluster.nodes=4-2: 2 is less than 4  ->  cluster.nodes=
cluster.nodes=2-  ->  cluster.nodes=  ->  cluster.nodes=
+cluster=local  cluster.nodes=2  ->  cluster.nodes=2 needs a cluster, such as +cluster=sandbox  ->  cluster.nodes
train.global_batch_size=18  ->  18 does not divide by 4 ranks  ->  16 or 20
train.micro_batch_size=3  ->  4 ranks x train.micro_batch_size=3  ->  12 or 24
parallel.dp_replicate=3  ->  parallel.dp_replicate=3 is not 4, the ranks of  ->  parallel.dp_replicate=4
parallel.tp=3  ->  parallel.tp=3 does not divide 4, the ranks of  ->  parallel.tp=2
parallel.tp=0  ->  parallel.tp=0 must be at least 1  ->  -1
parallel.dp_shard=-1  ->  dp_replicate and parallel.dp_shard are both -1  ->  parallel=fsdp
cluster.nodes=2  parallel.tp=8  ->  parallel.tp=8 does not divide cluster.tasks_per_node=4  ->  tp=2
parallel.tp=4  ->  model.n_kv_heads=2 does not divide by parallel.tp=4  ->  what can be: parallel.tp=2
parallel.cp=4  data.seq_len=6  ->  data.seq_len=6 does not divide by parallel.cp=4  ->  parallel.cp=2
data.seq_len=4096  ->  data.seq_len=4096 is longer than  ->  set model.max_seq_len=4096
data=mixture  ->  data.sources is empty  ->  name at least one
data=mixture  +data.sources.web.seq_len=6  data.weights={web: 1/0}  ->  weights.web is 1/0  ->  above 0
parallel.pp=4  model.tie_embeddings=false  ->  model.n_layers=3 are too few for 4  ->  parallel.pp=2
parallel.pp=2  model.tie_embeddings=false  train.micro_batch_size=8  ->  parallel.pp=2 stages want at  ->  batch_size=32
parallel.tp=2  parallel.sequence_parallel=false  model.dropout=0.1  ->  dropout=0.1 with  ->  true
parallel.pp=2  parallel.pp_schedule=zero_bubble  parallel.compile=true  ->  another parallel.pp_schedule  ->  leave
PIPELINE  model.n_layers=4  train.global_batch_size=10  ->  wants a multiple of parallel.pp=2 micro batches  ->  batch_size=8
parallel=fsdp  parallel.reshard_after_forward=3  ->  =3 does not cut 4 shards  ->  2, true or false
cluster.nodes=2  parallel=fsdp_tp  parallel.tp=2  parallel.reshard_after_forward=2  ->  =2 with parallel.tp=2  ->  true
optim.lr=0  ->  optim.lr=0.0 must be above 0  ->  3e-4
optim.lr=nan  ->  optim.lr=nan is not a number
optim.betas=[0.9,1.0]  ->  optim.betas[1]=1.0 must be at least 0 and below 1
train.steps=500  optim.warmup_steps=501  ->  optim.warmup_steps=501 needs as many train.steps  ->  out
preflight.exclude_slow=true  ->  preflight.exclude_slow=true needs preflight.mode=full  ->  leave
checkpoint.keep_last=1  ->  checkpoint.keep_last=1 must be at least 2  ->  one good checkpoint
~model._target_  ->  model._target_ is not set  ->  model=
data=prepared  ->  data.path
job=prepare  prepare.inputs=[a]  prepare.output=b  prepare.part=2  ->  prepare.part=2 needs more prepare.parts
job=command  ->  job.command is not set  ->  submit -- python
job=command  job.command='echo "a'  ->  No closing quotation  ->  close the quote
job.command='echo a'  ->  job.command=echo a needs job=command  ->  leave job.command out
job.finished_when=75  ->  job.finished_when=75 needs job=command  ->  leave job.finished_when out
job=command  job.command=x  job.finished_when=75  ->  job.finished_when=75 needs another exit code  ->  out
+cluster.sbatch.test-only=true  ->  cluster.sbatch has no option 'test-only'  ->  slurmtrain itself
+cluster.sbatch.mail_type=END  ->  cluster.sbatch has 'mail_type', which is not a long  ->  mail-type
+cluster.sbatch={--comment: x}  ->  cluster.sbatch has '--comment', which  ->  without the leading dashes
+cluster.sbatch.output=x  ->  cluster.sbatch has no option 'output'  ->  decided by the run directory
+cluster.sbatch.comment={a: 1}  ->  cluster.sbatch.comment={'a': 1} cannot be passed  ->  a list of texts
+cluster.env={a-b: c}  ->  cluster.env has 'a-b'  ->  NCCL_DEBUG
cluster.venv=/v  cluster.conda_env=c  ->  cluster.venv=/v and cluster.conda_env=c exclude each other  ->  null
cluster.container.kind=pyxis  ->  kind=pyxis needs cluster.container.image  ->  leave
+secrets.HF=file:token  ->  the path must be absolute
+secrets.HF=file:/dev/null  ->  must be a file of your own
cluster.container.image=a.sif  ->  image=a.sif needs cluster.container.kind  ->  leave
cluster.slurm_conf=/x  cluster.sandbox=y  ->  exclude each other  ->  keep one
cluster.slurm_conf=/no/such/file  ->  cluster.slurm_conf=/no/such/file is not a file  ->  null
job.runs_dir=file/below  ->  cannot create a run directory under  ->  job.runs_dir
train.steps=null  ->  train.steps=null is not a whole number  ->  --cfg job
cluster.modules={a: 1}  ->  cluster.modules={'a': 1} is not a list  ->  write cluster.modules=[a,b]
cluster.env=x  ->  cluster.env=x is not a mapping of keys to values  ->  +cluster.env.NAME=VALUE
model=base  ->  model.vocab_size is not set, and has no default  ->  write model.vocab_size=VALUE
+model.x=${oc.env:NOPE}  ->  Environment variable 'NOPE' not found  ->  --cfg job
train.steps=abc  ->  train.steps=abc is not a whole number  ->  --cfg job
train.tensorboard=maybe  ->  train.tensorboard=maybe is not true or false  ->  --cfg job
cluster.nodes=null  ->  cluster.nodes  ->  --cfg job
+cluster.env.WANDB_API_KEY=abc  ->  cluster.env.WANDB_API_KEY looks like a  ->  oc.env:WANDB_API_KEY
hooks.on_finish=' '  ->  hooks.on_finish=' ' is not filled in  ->  null
+cluster.env.API_KEY='${oc.env:SURELY_NOT_SET}'  ->  variable SURELY_NOT_SET is not set  ->  export
+cluster.env.API_KEY='${oc.env:SURELY_NOT_SET,x}'  ->  without a default  ->  oc.env:NAME
cluster.srun_args=[a,glob(*)]  ->  cluster.srun_args[1]=Glob(  ->  quote
eval.sets=${oc.env:HOME}  ->  is not a mapping of keys to values  ->  +eval.sets.NAME=VALUE
# Sizes of a model.
model=tiny  model.n_heads=5  ->  model.dim=32 cannot be divided among model.n_heads=5  ->  model.dim=40
model=tiny  model.n_kv_heads=3  ->  model.n_heads=4 cannot share model.n_kv_heads=3 evenly  ->  1, 2, 4
model=tiny  model.head_dim=7  ->  model.head_dim=7 is odd  ->  model.head_dim=8
model=tiny  model.n_layers=0  ->  n_layers=0 is not a whole number of at least 1  ->  model.n_layers
model=tiny  model.dropout=1  ->  model.dropout=1 is not a probability  ->  [0, 1)
# Adapters that could not be exported or laid out.
lora.r=4  lora.target_modules=[query,output]  ->  'output', which has the same weights as  ->  leave
lora.r=4  lora.target_modules=[q_proj]  ->  no linear layer of that name  ->  known are
lora.r=4  parallel.tp=2  ->  LoRA adapters cannot be combined with tensor  ->  parallel=fsdp
# Spare nodes, and copies on the nodes.
cluster.spare_nodes=1  requeue.in_place=false  ->  cluster.spare_nodes=1 needs requeue.in_place=true  ->  leave
cluster.spare_nodes=1  sweep.pack=2  ->  needs sweep.pack=1  ->  leave
+cluster=local  cluster.spare_nodes=1  ->  needs a SLURM cluster  ->  leave
checkpoint.local=copies  ->  checkpoint.local='copies' is not an absolute path  ->  /dev/shm
cluster.stage.dir=scratch  ->  is not a folder on a node  ->  $SLURM_TMPDIR
cluster.stage.data=[/a/x,/b/x]  ->  needs paths whose last parts differ  ->  leave
+cluster=local  cluster.stage.code=true  ->  cluster.stage needs a SLURM cluster  ->  leave
cluster.container={kind: apptainer, image: /a.sif}  cluster.stage.code=true  ->  ranks without a container  ->  leave
sweep.pack=2  cluster.stage.environment=true  ->  cluster.stage needs sweep.pack=1  ->  leave
job.snapshot=none  cluster.stage.code=true  ->  stage.code=true needs job.snapshot=auto  ->  leave
cluster.time_limit_min=1h  ->  =1h is not a whole number  ->  a number of minutes, without a unit, such as 60
# Evaluations.
+cluster=local  eval=job  ->  eval.mode=job needs a SLURM cluster  ->  leave eval.mode out
eval=job  checkpoint.keep_best=2  ->  checkpoint.keep_best=2 needs eval.mode=inline  ->  leave
eval=job  eval.cluster.nodez=2  ->  cluster has no field 'nodez'  ->  eval.cluster
eval=job  eval.cluster.time_limit_min=1  ->  is invalid: cluster.time_limit_min=1 and cluster.sig  ->  eval.cluster
eval=job  eval.parallel.tp=many  ->  parallel.tp=many is not a whole number  ->  eval.cluster
+eval.metrics.acuracy=true  ->  eval.metrics.acuracy: there is no such metric  ->  accuracy
+eval.metrics.top5=5  ->  eval.metrics.top5=5 has no _target_  ->  _target_
+eval.sets.wiki=/data/wiki  ->  eval.sets.wiki='/data/wiki' has no _target_  ->  _target_
+eval.sets.valid={_target_: a.B}  ->  'valid', which is not a valid name of a set  ->  letters
# What is observed.
+observe.loggers.mine={a: 1}  ->  has no _target_  ->  _target_
+observe.loggers.wandb={_target_: x.Y}  ->  not a valid name of a logger  ->  letters
observe.wandb.project=me/lm  ->  observe.wandb.project  ->  observe.wandb.entity
observe.textfile_dir=prom  ->  not an absolute path  ->  /dev/shm
observe.mlflow.experiment=''  ->  observe.mlflow.experiment='' is not filled in  ->  null leaves
job=command  job.command=true  +observe.loggers.mine={_target_: my.Logger}  ->  needs the built-in trainer  ->  leave
observe.profile_ranks=[4]  ->  needs ranks that the job has  ->  leave
job.stop_signal=SIGUSR1  ->  job.stop_signal=SIGUSR1 needs job=command  ->  leave
# Plans, sweeps and searches.
job=command  job.command=true  plan  ->  plan works with the built-in trainer
model._target_=my.Model  plan  ->  plan supports only the built-in decoder
cluster.network_gb_per_s=0  plan  ->  cluster.network_gb_per_s=0.0 must be above 0
-m  model=tiny  model.dim=32  data.seq_len=64  model.n_heads=4,5  ->  point 1 (model.n_heads=5)
-m  train.seed=1,2  sweep.pack=2  requeue.mode=resubmit  ->  sweep.pack=2 with requeue.mode=resubmit
-m  train.seed=1,2  requeue=chain  ->  requeue.mode=chain
-m  hydra/sweeper=optuna  optim.lr=interval(1,2)  requeue=chain  ->  requeue.mode=chain
"""
PIPELINE = "parallel.pp=2  model.tie_embeddings=false  train.micro_batch_size=1  parallel.pp_schedule=interleaved_1f1b"


def on_a_cluster(words: list[str]) -> list[str]:
    cluster = [] if words[0].startswith("+cluster=") else ["+cluster=a100x4"]
    return [*cluster, *words, *([] if words[-1] == "plan" else ["submit"])]


BAD_CONFIGS = [
    *((on_a_cluster(words_of(each[0])), *each[1:]) for each in cells_of(TABLE.replace("PIPELINE", PIPELINE), 3)),
    ([*SLURM, "job.name='a\nb'"], "job.name='a\\nb' is not a single line", "control characters"),
    ([*SLURM, "job.runs_dir='a\ntouch x'"], "job.runs_dir='a\\ntouch x' is not a single line", ""),
    ([*SLURM, "hooks.on_finish='a\0b'"], "hooks.on_finish='a\\x00b' is not text", ""),
    ([*SLURM, "cluster.partition='a\n#SBATCH --uid=0'"], "cluster.partition='a\\n#SBATCH --uid=0' is not", "control"),
    ([*SLURM, "cluster.srun_args=['--a\nb']"], "cluster.srun_args[0]='--a\\nb' is not a single line", ""),
    ([*SLURM, "+cluster.sbatch.comment='x\ny'"], "cluster.sbatch.comment='x\\ny' cannot be passed", "one line"),
    ([*SLURM, 'cluster.setup=["echo \udcff"]'], "is not text in UTF-8", "locale"),
]
# What is no config at all: exit code 2.
BAD_WORDS = [
    ([*SLURM, "hydra.searchpath=[/x]"], "folders of configs are not read from it", "--config-dir FOLDER"),
    ([*SLURM, "model=" + "a" * 100_000], "there is no model called 'aaa", "llama3_8b"),
    ([*SLURM, "status"], "submit and status are both verbs", "two commands"),
    ([*SLURM, "optim.lr"], "'optim.lr' is a key without a value", "optim.lr=VALUE"),
    ([*SLURM, "optim.lr=1e-3,3e-4"], "optim.lr=1e-3,3e-4 gives several values", "-m optim.lr=1e-3,3e-4 submit"),
    (["--cluster", "local", "submit"], "there is no option '--cluster'", "cluster=local"),
    ([*SLURM, "--optim.lr=3"], "there is no option '--optim.lr'", "optim.lr=3"),
    ([*SLURM, "-lr", "1e-3"], "there is no option '-lr'", "did you mean optim.lr?"),
    ([*SLURM, "lr=1e-3"], "there is no config key 'lr'", "did you mean optim.lr?"),
    ([*SLURM, "watchdog=off"], "watchdog is a group of fields", "one by one: watchdog.enabled"),
    ([*SLURM, "cluster.container=pyxis"], "cluster.container is a group", "write cluster.container.kind=pyxis"),
    ([*SLURM, "logger=wandb"], "there is no config key 'logger'", "TensorBoard"),
    ([*SLURM, "~xyzzy"], "there is no config key 'xyzzy'", "known are"),
    ([*SLURM, 'cluster.setup=["echo ${USER}"]'], "there is no key called 'USER'", "for bash write $USER"),
    ([*LOCAL, "--after", "last"], "has no queue", "submit when it has finished"),
    (["progress", "10"], "works only inside a run: SLURMTRAIN_RUN_DIR is not set", "submit -- bash"),
    (["progress", "ten"], "STEP: 'ten' is not a whole number", "progress --help"),
    # The nearest name.
    ([], "no verb given", "submit, render, train, status"),
    (["submt"], "there is no verb 'submt'", "submit"),
    (["submit", "xyz"], "cannot read 'xyz'", "known are"),
    (["submit", "train.stepz=3"], "train has no field 'stepz'", "did you mean train.steps"),
    (["submit", "cluster.container.imag=x"], "cluster.container has no field 'imag'", "cluster.container.image"),
    (["submit", "hydra/sweeper=optunaa"], "there is no hydra/sweeper called 'optunaa'", "did you mean optuna?"),
    (["nodes", "--cluster", "c"], "there is no option '--cluster'", "nodes --help shows what it takes"),
    (["status", "--jsn"], "there is no option '--jsn'", "--json"),
    (["runs"], "runs needs one of compare|prune", "runs --help"),
    (["logs"], "required: RUN", "logs"),
    (["help", "sekrets"], "there is no topic 'sekrets'", "did you mean secrets"),
    (["submit", "--config-name"], "--config-name needs a value", ""),
    (["submit", "model.layrs=3"], "model has no key 'layrs'", "did you mean model.n_layers? (+model.layrs=3 adds it)"),
    (["submit", "model=tiny", "+model.a.b=1", "model.a.c=2"], "model.a has no key 'c'", "known are: b"),
    (["submit", "cluster.env.A=1"], "cluster.env has no key 'A'", "write +cluster.env.A=1"),
    (["submit", "--config-dir", "nowhere"], "there is no such folder", ""),
    (["submit", "-cn", "nothing"], "nothing", ""),
    (["--cfg", "jb"], "'jb' is not a value of --cfg", "did you mean job"),
    (["submit", "=3"], "cannot read the override '=3'", "key=value"),
    (["submit", "job.name=it's"], "in which a quote does not end", "it is typed \"job.name='it\\'s'\""),
    (["submit", "cluster.container.image=a#b"], "cannot read the override 'cluster.container.image=a#b'", "quote"),
    (["--multirun", "render", "train.steps=1,2"], "works with submit", "-m"),
    # What is not there.
    (["status", "last"], "there are no runs under ", "SLURMTRAIN_RUNS"),
    (["resume", "last"], "there are no runs under ", "SLURMTRAIN_RUNS"),
    (["train", "."], " is not a run directory", ""),
    (["train", ".", "train.steps=3"], "takes its config only from the run directory", ""),
    (["nodes", "forgive"], "name the nodes to forgive", "nodes forgive NODE, or nodes forgive --all"),
    (["nodes", "forgive", "n3", "--cluster", "../x"], "../x: its name cannot be that of a file", ""),
    # A program of one's own.
    ([*LOCAL, "+lr=1", "--", "x.py", "${lrr}"], "the program has ${lrr}, and the config no lrr", "did you mean lr"),
    ([*LOCAL, "+lr=1", "--", "x.py", "$LR"], "no word of the program refers to +lr=1", "write '${lr}', in quotes"),
    ([*LOCAL, "python", "x.py", "--lr", "1"], "there is no option '--lr'", "-- python x.py --lr 1"),
    ([*LOCAL, "+lr=1,2", "--", "x.py", "${lr}"], "+lr=1,2 gives several values", "-m +lr=1,2 submit"),
    (["resume", "last", "--", "x.py", "a b"], "not with resume", "resume RUN 'job.command="),
    (["--", "submit"], "works with submit and render and train and drill, not with no verb at all", ""),
    ([*LOCAL, "job.command=date", "--", "python"], "job.command=date and a program after -- contradict each other", ""),
    ([*LOCAL, "job=prepare", "--", "python"], "job=prepare and a program after --", ""),
    # Plans, sweeps and searches.
    (["plan", "--tokens", "1e30"], "'1e30' is not a number of tokens such as 15T, 300B or 1.5e12, below 1e18", ""),
    ([*SLURM, "-m", "train.seed=1,2", "search.pruner=median"], "", "hydra/sweeper=optuna"),  # it would prune nothing
    (["-m", "submit", "optim.lr=interval(1e-5,1e-2)"], "gives a range, not choices", ""),
    (["-m", "submit", "hydra.job.name=a,b"], "Hydra's own settings cannot vary", ""),
    (["-m", "submit", "optim.lr=1,,2"], "cannot read the override", ""),
    (["-m", "submit", "model=glob(nothing*)"], "has no choices", ""),
    ([*SEARCH, "hydra.sweeper.n_trials=x"], "hydra.sweeper.n_trials=x: expected a number of trials", ""),
    ([*SEARCH, "hydra/sweeper/sampler=grid"], "grid needs choices, but optim.lr is an interval", ""),
    ([*SEARCH, "optim.lr=interval(2,1)"], "", "the smaller number comes first"),
    ([*SEARCH, "optim.lr=3"], "a search needs values to choose", ""),
    ([*SEARCH, "cluster=a100x4", "eval.mode=job"], "eval.mode=job in a search", ""),
    ([*SEARCH, "--dry-run"], "--dry-run cannot show a search", ""),
]


@pytest.fixture
def nothing_left(project: Path, slurm: FakeSlurm) -> FakeSlurm:
    (project / "file").write_text("no folder")
    return slurm


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run, and give the exit code, the sentence and the hint, after making sure that there is one of each at most."""
    code = main(words)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    ending = "".join(
        line
        for line in said.err.splitlines(keepends=True)
        if not re.search("; trying again in about |; checking whether the job exists", line)
    )
    sentence, *hint = ending.rstrip("\n").split("\n  hint: ")
    assert "\n" not in sentence and sentence.startswith("slurmtrain: error: ")
    assert all("\n" not in line for line in hint)
    assert said.out == ""
    return code, sentence, "".join(hint)


@pytest.mark.parametrize(("words", "sentence", "hint"), BAD_CONFIGS, ids=lambda value: str(value)[-40:])
def test_a_bad_value_is_refused_with_a_sentence_and_leaves_nothing(
    words: list[str],
    sentence: str,
    hint: str,
    nothing_left: FakeSlurm,
    project: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said, hinted = refused(words, capsys)
    assert code == EXIT_CONFIG
    assert sentence in said and hint in hinted
    assert nothing_left.submitted == []
    assert [path.name for path in project.iterdir()] == ["file"]


@pytest.mark.parametrize(("words", "sentence", "hint"), BAD_WORDS, ids=lambda value: str(value)[-40:])
def test_words_that_cannot_be_understood_are_answered_with_those_that_can(
    words: list[str], sentence: str, hint: str, nothing_left: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, hinted = refused(words, capsys)
    assert code == EXIT_USAGE
    assert sentence in said and hint in hinted and len(said) < 400
    assert nothing_left.submitted == []


@pytest.mark.parametrize(
    "text",
    [
        "model: ${oc.env:MY_TOKEN}",
        "defaults: ['${oc.env:MY_TOKEN}']",
        "_target_: a\nb: ${oc.decode:'[${oc.env:MY_TOKEN}'}",
        "# @package _global_\ntrain: {steps: '${oc.decode:${oc.env:MY_TOKEN}}'}",
    ],
)
def test_an_interpolation_that_fails_does_not_show_the_secret_in_it(
    text: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "sekritvalue")
    (project / "own/model").mkdir(parents=True)
    (project / "own/model/mine.yaml").write_text(text.replace("model: $", "# @package _global_\nmodel: $"))
    _, said, hint = refused(["--config-dir", "own", "model=mine", *SLURM], capsys)
    assert "sekritvalue" not in said + hint


# The world around.


def test_a_work_tree_that_is_too_large_names_its_largest_files(
    nothing_left: FakeSlurm, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (project / "weights.bin").write_bytes(bytes(2_000_000))
    (project / ".gitignore").write_text("runs/\n")
    code, said, hint = refused([*SLURM, "job.snapshot_max_mb=1"], capsys)
    assert code == EXIT_CONFIG
    assert "has 2 MB to copy, more than job.snapshot_max_mb=1" in said and "weights.bin (2 MB)" in said
    assert ".gitignore" in hint and "job.snapshot=none" in hint
    assert nothing_left.submitted == [] and not (project / "runs").exists()


@pytest.mark.parametrize("git", ["there is none", "dubious ownership"])
def test_a_work_tree_that_git_cannot_read_is_not_run_in_place(
    git: str,
    nothing_left: FakeSlurm,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    if git == "there is none":
        monkeypatch.setenv("PATH", str(nothing_left.directory))
    else:
        nothing_left.command("git", "echo \"fatal: detected dubious ownership in repository at '$PWD'\" >&2; exit 128")
    for folder in (project, project / "below"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        code, said, hint = refused(SLURM, capsys)
        assert code == EXIT_CONFIG
        assert "because git failed: " in said and ("dubious ownership in" in said or "git is not installed" in said)
        assert "job.snapshot=none" in hint
        assert nothing_left.submitted == [] and not (folder / "runs").exists()
    if git == "dubious ownership":  # submitit itself needs a PATH with more in it
        assert main([*SLURM, "job.snapshot=none"]) == 0


def test_a_sandbox_that_does_not_run_is_said_before_anything_is_made(
    nothing_left: FakeSlurm, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, hint = refused(["+cluster=sandbox", "cluster.sandbox=not-there", "submit"], capsys)
    assert code == 1
    assert "the sandbox 'not-there' is not running" in said and "sandbox up --name not-there; " in hint
    assert nothing_left.submitted == [] and not (project / "runs").exists()


def test_without_sbatch_the_run_directory_is_removed_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, said, hint = refused(SLURM, capsys)
    assert code == 1
    assert "there is no `sbatch` on this machine" in said and "apt-get install slurm-wlm" in hint
    assert not (project / "runs").exists()


def test_render_into_a_folder_that_is_not_there(
    nothing_left: FakeSlurm, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("no/such/job.sbatch", "."):
        code, said, _ = refused(["+cluster=a100x4", "render", "-o", target], capsys)
        assert code == EXIT_USAGE and f"cannot write {target}" in said
    assert not (project / "runs").exists()


# Runs that are meant wrongly.


@pytest.fixture
def two_runs(project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> list[str]:
    for _ in range(2):
        assert main(SLURM) == 0
    capsys.readouterr()
    return sorted(path.name for path in project.glob("runs/train/*"))


def test_an_unknown_run_names_the_latest_and_an_ambiguous_beginning_the_candidates(
    two_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, hint = refused(["status", "1999"], capsys)
    assert code == EXIT_USAGE and "no run's id begins with '1999'" in said and two_runs[-1] in hint
    code, said, hint = refused(["status", "20"], capsys)
    assert code == EXIT_USAGE and "2 runs begin with '20'" in said and all(run in hint for run in two_runs)


def test_logs_of_what_is_not_there(two_runs: list[str], project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = two_runs[0]
    code, said, _ = refused(["logs", run], capsys)
    assert code == EXIT_USAGE and "has not started yet" in said
    attempt = project / "runs/train" / run / "attempts/0001"
    attempt.mkdir()
    code, said, hint = refused(["logs", run, "--attempt", "3"], capsys)
    assert code == EXIT_USAGE and "has no attempt 3" in said and "it has: 1" in hint
    code, said, hint = refused(["logs", run], capsys)
    assert code == EXIT_USAGE and "no log of rank 0" in said and "no rank has started" in hint
    (attempt / "rank-0.log").write_text("")
    code, said, hint = refused(["logs", run, "--rank", "7"], capsys)
    assert code == EXIT_USAGE and "no log of rank 7" in said and "ranks 0 to 0" in hint
