"""Every bad value gets its sentence and its exit code, before anything is submitted or left behind."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.errors import EXIT_CONFIG, EXIT_USAGE
from tests.support.fake_slurm import FakeSlurm

SLURM = ["+cluster=a100x4", "submit"]
LOCAL = ["+cluster=local", "submit"]
PIPELINE = ["parallel.pp=2", "model.tie_embeddings=false", "train.micro_batch_size=1"]
COMMAND = ["+cluster=a100x4", "job=command", "submit"]
APPTAINER = ["cluster.container.kind=apptainer", "cluster.container.image=/a.sif"]
SPARE = "cluster.spare_nodes=1"

# Words on the command line -> a part of the sentence, a part of the hint.
BAD_CONFIGS = [
    ([*SLURM, "job.name='a b'"], "job.name='a b' is not", "folder"),
    ([*SLURM, "job.name='a\nb'"], "job.name='a\\nb' is not a single line", "control characters"),
    ([*SLURM, "job.name='$(touch x)'"], "job.name='$(touch x)' is not", "folder"),
    ([*SLURM, "job.name='../x'"], "job.name='../x' is not", "folder"),
    ([*SLURM, "job.name=''"], "job.name='' is not", "folder"),
    ([*SLURM, "job.name=" + "x" * 65], "at most 64", "folder"),
    ([*SLURM, "job.kind=trian"], "job.kind=trian is not known", "train, command"),
    (
        [*SLURM, "cluster.time_limit_min=5", "cluster.signal_lead_s=240"],
        "cluster.time_limit_min=5 and cluster.signal_lead_s=240 need more time between",
        "leave cluster.time_limit_min out",
    ),
    ([*SLURM, "cluster.time_limit_min=1"], "time_limit_min=1 and cluster.signal_lead_s=300 need", "time_limit_min"),
    ([*SLURM, "cluster.mem_per_cpu_gb=2"], "mem_per_node_gb=480 and cluster.mem_per_cpu_gb=2 exclude", "null"),
    (
        [*LOCAL, "cluster.mem_per_gpu_gb=2"],
        "mem_per_gpu_gb=2 needs cluster.gpus_per_node",
        "leave cluster.mem_per_gpu_gb",
    ),
    (
        [*SLURM, "cluster.gpus_per_node=0"],
        "cluster.gpu_type=a100 need cluster.gpus_per_node",
        "leave cluster.gpu_memory_gb",
    ),
    (
        [*SLURM, "cluster.tasks_per_node=8"],
        "tasks_per_node=8 needs as many cluster.gpus_per_node",
        "leave cluster.tasks",
    ),
    ([*SLURM, "cluster.nodes=0"], "cluster.nodes=0 must be at least 1", ""),
    ([*LOCAL, "cluster.nodes=2"], "cluster.nodes=2 needs a cluster, such as +cluster=sandbox", "cluster.nodes"),
    ([*SLURM, "train.global_batch_size=18"], "18 does not divide by 4 ranks", "16 or 20"),
    ([*SLURM, "train.global_batch_size=3"], "3 does not divide by 4 ranks", "do: 4"),
    ([*SLURM, "train.micro_batch_size=3"], "4 ranks x train.micro_batch_size=3", "12 or 24"),
    ([*SLURM, "parallel.dp_replicate=3"], "parallel.dp_replicate=3 is not 4, the ranks of", "parallel.dp_replicate=4"),
    ([*SLURM, "parallel.tp=3"], "parallel.tp=3 does not divide 4, the ranks of", "parallel.tp=2"),
    ([*SLURM, "parallel.tp=0"], "parallel.tp=0 must be at least 1", "-1"),
    ([*SLURM, "parallel.dp_shard=-1"], "dp_replicate and parallel.dp_shard are both -1", "parallel=fsdp"),
    ([*SLURM, "cluster.nodes=2", "parallel.tp=8"], "parallel.tp=8 does not divide cluster.tasks_per_node=4", "tp=2"),
    ([*SLURM, "parallel.tp=4"], "model.n_kv_heads=2 does not divide by parallel.tp=4", "what can be: parallel.tp=2"),
    ([*SLURM, "parallel.cp=4", "data.seq_len=6"], "data.seq_len=6 does not divide by parallel.cp=4", "parallel.cp=2"),
    ([*SLURM, "data.seq_len=4096"], "data.seq_len=4096 is longer than", "set model.max_seq_len=4096"),
    ([*SLURM, "data=mixture"], "data.sources is empty", "name at least one"),
    (
        [*SLURM, "data=mixture", "+data.sources.web.seq_len=6", "data.weights={web: 1/0}"],
        "weights.web is 1/0",
        "above 0",
    ),
    (
        [*SLURM, "parallel.cp=4", "data=mixture", "+data.sources.web.seq_len=6"],
        "data.sources.web.seq_len=6 does not",
        "parallel.cp=2",
    ),
    ([*SLURM, "parallel.pp=4", "model.tie_embeddings=false"], "model.n_layers=3 are too few for 4", "parallel.pp=2"),
    ([*SLURM, *PIPELINE, "train.micro_batch_size=8"], "parallel.pp=2 stages want at", "train.global_batch_size=32"),
    ([*SLURM, "parallel.tp=2", "parallel.sequence_parallel=false", "model.dropout=0.1"], "dropout=0.1 with", "true"),
    (
        [*SLURM, "parallel.pp=2", "parallel.pp_schedule=zero_bubble", "parallel.compile=true"],
        "parallel.compile=true needs another parallel.pp_schedule, such as interleaved_1f1b",
        "leave parallel.compile out",
    ),
    (
        [*SLURM, *PIPELINE, "model.n_layers=4", "parallel.pp_schedule=interleaved_1f1b", "train.global_batch_size=10"],
        "parallel.pp_schedule=interleaved_1f1b wants a multiple of parallel.pp=2 micro batches",
        "train.global_batch_size=8",
    ),
    (
        [*SLURM, "parallel=fsdp", "parallel.reshard_after_forward=3"],
        "parallel.reshard_after_forward=3 does not cut 4 shards",
        "2, true or false",
    ),
    (
        [*SLURM, "cluster.nodes=2", "parallel=fsdp_tp", "parallel.tp=2", "parallel.reshard_after_forward=2"],
        "parallel.reshard_after_forward=2 with parallel.tp=2",
        "true or false",
    ),
    ([*SLURM, "parallel.reshard_after_forward=1"], "reshard_after_forward=1 does not cut 1 shards", "true or false"),
    ([*SLURM, "parallel.param_dtype=float32"], "parallel.param_dtype=float32 is not known", "null, bfloat16"),
    ([*SLURM, "optim.lr=0"], "optim.lr=0.0 must be above 0", "3e-4"),
    ([*SLURM, "optim.lr=nan"], "optim.lr=nan is not a number", ""),
    ([*SLURM, "optim.betas=[0.9,1.0]"], "optim.betas[1]=1.0 must be at least 0 and below 1", ""),
    ([*SLURM, "optim.betas=[0.9]"], "optim.betas", ""),
    ([*SLURM, "optim.min_lr_ratio=2"], "optim.min_lr_ratio=2.0 must be at least 0 and at most 1", ""),
    ([*SLURM, "train.steps=500", "optim.warmup_steps=501"], "optim.warmup_steps=501 needs as many train.steps", "out"),
    ([*SLURM, "preflight.slow_share=1"], "preflight.slow_share=1.0 must be above 0 and below 1", ""),
    ([*SLURM, "preflight.exclude_slow=true"], "preflight.exclude_slow=true needs preflight.mode=full", "leave"),
    ([*SLURM, "job.kind=preflight"], "job.kind=preflight is not known", "train, command, prepare"),
    ([*SLURM, "checkpoint.keep_last=1"], "checkpoint.keep_last=1 must be at least 2", "one good checkpoint"),
    ([*SLURM, "~model._target_"], "model._target_ is not set", "model="),
    ([*SLURM, "data=files"], "data.paths", ""),
    (COMMAND, "job.command is not set", "submit -- python"),
    ([*COMMAND, "job.command='echo \"a'"], "No closing quotation", "close the quote"),
    ([*SLURM, "job.command='echo a'"], "job.command=echo a needs job=command", "leave job.command out"),
    ([*SLURM, "job.finished_when=75"], "job.finished_when=75 needs job=command", "leave job.finished_when out"),
    ([*COMMAND, "job.command=x", "job.finished_when=75"], "job.finished_when=75 needs another exit code", "out"),
    ([*SLURM, "job.checkpoint_complete=x"], "job.checkpoint_complete=x needs job=command", "out"),
    ([*SLURM, "+cluster.sbatch.outp=x"], "cluster.sbatch has no option 'outp'", "decided by the run directory"),
    ([*SLURM, "+cluster.sbatch.test-only=true"], "cluster.sbatch has no option 'test-only'", "slurmtrain itself"),
    ([*SLURM, "+cluster.sbatch.mail_type=END"], "cluster.sbatch has 'mail_type', which is not a long", "mail-type"),
    ([*SLURM, "+cluster.sbatch={--comment: x}"], "cluster.sbatch has '--comment', which", "without the leading dashes"),
    ([*SLURM, "+cluster.sbatch.output=x"], "cluster.sbatch has no option 'output'", "decided by the run directory"),
    ([*SLURM, "+cluster.sbatch.comment={a: 1}"], "cluster.sbatch.comment={'a': 1} cannot be passed", "a list of texts"),
    ([*SLURM, "+cluster.env={a-b: c}"], "cluster.env has 'a-b'", "NCCL_DEBUG"),
    ([*SLURM, "cluster.partition='a\n#SBATCH --uid=0'"], "cluster.partition='a\\n#SBATCH --uid=0' is not", "control"),
    ([*SLURM, "+cluster.env.A='x\ny'"], "cluster.env.A='x\\ny' is not a single line", ""),
    ([*SLURM, "cluster.srun_args=['--a\nb']"], "cluster.srun_args[0]='--a\\nb' is not a single line", ""),
    ([*SLURM, "+cluster.sbatch.comment='x\ny'"], "cluster.sbatch.comment='x\\ny' cannot be passed", "one line"),
    (
        [*SLURM, "cluster.venv=/v", "cluster.conda_env=c"],
        "cluster.venv=/v and cluster.conda_env=c exclude each other",
        "null",
    ),
    ([*SLURM, "cluster.container.kind=pyxis"], "kind=pyxis needs cluster.container.image", "leave"),
    ([*SLURM, "cluster.container.image=a.sif"], "image=a.sif needs cluster.container.kind", "leave"),
    ([*SLURM, "cluster.slurm_conf=/x", "cluster.sandbox=y"], "exclude each other", "keep one"),
    ([*SLURM, "cluster.slurm_conf=/no/such/file"], "cluster.slurm_conf=/no/such/file is not a file", "null"),
    ([*SLURM, "job.runs_dir=file/below"], "cannot create a run directory under", "job.runs_dir"),
    ([*SLURM, "job.runs_dir=/proc/nowhere"], "cannot create a run directory under /proc/nowhere", "job.runs_dir"),
    ([*SLURM, "+train.steps="], "train.steps= is not a whole number", "--cfg job"),
    ([*SLURM, "train.steps=null"], "train.steps=null is not a whole number", "--cfg job"),
    ([*SLURM, "cluster.modules={a: 1}"], "cluster.modules={'a': 1} is not a list", "write cluster.modules=[a,b]"),
    ([*SLURM, "cluster.env=x"], "cluster.env=x is not a mapping of keys to values", "+cluster.env.NAME=VALUE"),
    ([*SLURM, "model=base"], "model.vocab_size is not set, and has no default", "write model.vocab_size=VALUE"),
    ([*SLURM, "+model.x=${oc.env:NOPE}"], "Environment variable 'NOPE' not found", "--cfg job"),
    ([*SLURM, "train.steps=abc"], "train.steps=abc is not a whole number", "--cfg job"),
    ([*SLURM, "train.tensorboard=maybe"], "train.tensorboard=maybe is not true or false", "--cfg job"),
    ([*SLURM, "cluster.nodes=null"], "cluster.nodes", "--cfg job"),
    ([*SLURM, "+cluster.env.WANDB_API_KEY=abc"], "cluster.env.WANDB_API_KEY looks like a", "oc.env:WANDB_API_KEY"),
    ([*SLURM, "hooks.on_finish=' '"], "hooks.on_finish=' ' is not filled in", "null"),
    ([*SLURM, "+secrets.HF=x"], "secrets.HF is neither env nor file:PATH", "not what it is"),
    ([*SLURM, "+cluster.env.API_KEY='${oc.env:SURELY_NOT_SET}'"], "variable SURELY_NOT_SET is not set", "export"),
    ([*SLURM, "+cluster.env.API_KEY='${oc.env:SURELY_NOT_SET,x}'"], "without a default", "oc.env:NAME"),
    ([*SLURM, "checkpoint.allow=[[1,2]]"], "checkpoint.allow[0]=[1, 2] is not text", "--cfg job"),
    ([*SLURM, "cluster.modules=[{a: 1}]"], "cluster.modules[0]={'a': 1} is not text", "quote"),
    ([*SLURM, "cluster.srun_args=[a,glob(*)]"], "cluster.srun_args[1]=Glob(", "quote"),
    ([*SLURM, "eval.sets=${oc.env:HOME}"], "is not a mapping of keys to values", "+eval.sets.NAME=VALUE"),
    ([*SLURM, 'cluster.setup=["echo \udcff"]'], "is not text in UTF-8", "locale"),
    # Sizes of a model.
    ([*SLURM, "model=tiny", "model.n_heads=5"], "model.dim=32 cannot be divided among model.n_heads=5", "model.dim=40"),
    ([*SLURM, "model=tiny", "model.n_kv_heads=3"], "model.n_heads=4 cannot share model.n_kv_heads=3 evenly", "1, 2, 4"),
    ([*SLURM, "model=tiny", "model.head_dim=7"], "model.head_dim=7 is odd", "model.head_dim=8"),
    (
        [*SLURM, "model=tiny", "model.n_layers=0"],
        "model.n_layers=0 is not a whole number of at least 1",
        "model.n_layers",
    ),
    ([*SLURM, "model=tiny", "model.dropout=1"], "model.dropout=1 is not a probability", "[0, 1)"),
    # Adapters that could not be exported or laid out.
    ([*SLURM, "lora.r=4", "lora.target_modules=[query,output]"], "'output', which has the same weights as", "leave"),
    ([*SLURM, "lora.r=4", "lora.target_modules=[q_proj]"], "no linear layer of that name", "known are"),
    ([*SLURM, "lora.r=4", "lora.target_modules=[embedding]"], "'embedding', and the built-in", "known are"),
    ([*SLURM, "lora.r=4", "parallel.tp=2"], "LoRA adapters cannot be combined with tensor", "parallel=fsdp"),
    # Spare nodes, and copies on the nodes.
    ([*SLURM, SPARE, "requeue.in_place=false"], "cluster.spare_nodes=1 needs requeue.in_place=true", "leave"),
    ([*SLURM, SPARE, "sweep.pack=2"], "needs sweep.pack=1", "leave"),
    ([*LOCAL, SPARE], "needs a SLURM cluster", "leave"),
    ([*SLURM, "checkpoint.local=copies"], "checkpoint.local='copies' is not an absolute path", "/dev/shm"),
    ([*SLURM, "checkpoint.local_every_steps=5"], "local_every_steps=5 needs checkpoint.local", "leave"),
    ([*SLURM, "cluster.stage.dir=scratch"], "is not a folder on a node", "$SLURM_TMPDIR"),
    ([*SLURM, "cluster.stage.dir='/tmp/$(id)'"], "is not a folder on a node", "$SLURM_TMPDIR"),
    ([*SLURM, "cluster.stage.data=[/a/x,/b/x]"], "needs paths whose last parts differ", "leave"),
    ([*LOCAL, "cluster.stage.code=true"], "cluster.stage needs a SLURM cluster", "leave"),
    ([*SLURM, *APPTAINER, "cluster.stage.code=true"], "cluster.stage needs ranks without a container", "leave"),
    ([*SLURM, "sweep.pack=2", "cluster.stage.environment=true"], "cluster.stage needs sweep.pack=1", "leave"),
    ([*SLURM, "job.snapshot=none", "cluster.stage.code=true"], "stage.code=true needs job.snapshot=auto", "leave"),
    (
        [*SLURM, "cluster.time_limit_min=1h"],
        "=1h is not a whole number",
        "a number of minutes, without a unit, such as 60",
    ),
    (
        [*SLURM, "cluster.signal_lead_s=2 min"],
        "=2 min is not a whole number",
        "of seconds, without a unit, such as 120",
    ),
    # Evaluations.
    ([*LOCAL, "eval=job"], "eval.mode=job needs a SLURM cluster", "leave eval.mode out"),
    ([*SLURM, "eval=job", "checkpoint.keep_best=2"], "checkpoint.keep_best=2 needs eval.mode=inline", "leave"),
    ([*SLURM, "eval=job", "eval.cluster.nodez=2"], "cluster has no field 'nodez'", "eval.cluster"),
    (
        [*SLURM, "eval=job", "eval.cluster.time_limit_min=1"],
        "is invalid: cluster.time_limit_min=1 and cluster.sig",
        "eval.cluster",
    ),
    ([*SLURM, "eval=job", "eval.parallel.tp=3"], "parallel.tp=3", "eval.cluster"),
    ([*SLURM, "eval=job", "eval.parallel.tp=many"], "parallel.tp=many is not a whole number", "eval.cluster"),
    ([*SLURM, "+eval.metrics.acuracy=true"], "eval.metrics.acuracy: there is no such metric", "accuracy"),
    ([*SLURM, "+eval.metrics.top5=5"], "eval.metrics.top5=5 has no _target_", "_target_"),
    ([*SLURM, "+eval.sets.wiki=/data/wiki"], "eval.sets.wiki='/data/wiki' has no _target_", "_target_"),
    ([*SLURM, "+eval.sets.valid={_target_: a.B}"], "'valid', which is not a valid name of a set", "letters"),
    # What is observed.
    ([*SLURM, "+observe.loggers.mine={a: 1}"], "has no _target_", "_target_"),
    ([*SLURM, "+observe.loggers.wandb={_target_: x.Y}"], "not a valid name of a logger", "letters"),
    ([*SLURM, "observe.wandb.project=me/lm"], "observe.wandb.project", "observe.wandb.entity"),
    ([*SLURM, "observe.textfile_dir=prom"], "not an absolute path", "/dev/shm"),
    ([*SLURM, "observe.mlflow.experiment=''"], "observe.mlflow.experiment='' is not filled in", "null leaves"),
    (
        [*COMMAND, "job.command=true", "+observe.loggers.mine={_target_: my.Logger}"],
        "needs the built-in trainer",
        "leave",
    ),
    ([*SLURM, "train.steps=20", "observe.profile_steps=21-22"], "needs as many train.steps", "leave"),
    ([*SLURM, "observe.profile_ranks=[4]"], "needs ranks that the job has", "leave"),
    ([*COMMAND, "job.command=true", "observe.profile_steps=3"], "needs the built-in trainer", "leave"),
    ([*SLURM, "job.stop_signal=SIGUSR1"], "job.stop_signal=SIGUSR1 needs job=command", "leave"),
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
    ([*SLURM, "sweep=2"], "sweep is a group of fields", "one by one: sweep.pack"),
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
    (["submt", "--", "python", "x.py"], "there is no verb 'submt'", "did you mean submit"),
    (["submit", "xyz"], "cannot read 'xyz'", "known are"),
    (["submit", "train.stepz=3"], "train has no field 'stepz'", "did you mean train.steps"),
    (["submit", "+cluster.node=3"], "cluster has no field 'node'", "did you mean cluster.nodes or "),
    (["submit", "cluster.container.imag=x"], "cluster.container has no field 'imag'", "cluster.container.image"),
    (["submit", "cluster=a100"], "there is no cluster called 'a100'", "a100x4"),
    (["submit", "+cluster=lokal"], "there is no cluster called 'lokal'", "did you mean local"),
    (["submit", "hydra/sweeper=optunaa"], "there is no hydra/sweeper called 'optunaa'", "did you mean optuna?"),
    (["--dryrun", "submit"], "there is no option '--dryrun'", "--dry-run"),
    (["nodes", "--cluster", "c"], "there is no option '--cluster'", "nodes --help shows what it takes"),
    (["status", "--jsn"], "there is no option '--jsn'", "--json"),
    (["sandbox", "upp"], "'upp' is not one of up|down|status|env", "did you mean up"),
    (["runs"], "runs needs one of compare|prune", "runs --help"),
    (["logs"], "required: RUN", "logs"),
    (["help", "sekrets"], "there is no topic 'sekrets'", "did you mean secrets"),
    (["submit", "--config-name"], "--config-name needs a value", ""),
    (["submit", "model.layrs=3"], "model has no key 'layrs'", "did you mean model.n_layers? (+model.layrs=3 adds it)"),
    (["submit", "model=tiny", "+model.a.b=1", "model.a.c=2"], "model.a has no key 'c'", "known are: b"),
    (["submit", "~model.layrs"], "model has no key 'layrs'", "did you mean model.n_layers?"),
    (["submit", "cluster.env.A=1"], "cluster.env has no key 'A'", "write +cluster.env.A=1"),
    (["submit", "--config-dir", "nowhere"], "there is no such folder", ""),
    (["submit", "-cn", "nothing"], "nothing", ""),
    (["--cfg", "jb"], "'jb' is not a value of --cfg", "did you mean job"),
    (["submit", "=3"], "cannot read the override '=3'", "key=value"),
    (["submit", "job.name=it's"], "in which a quote does not end", "it is typed \"job.name='it\\'s'\""),
    (["submit", 'cluster.account=a"b'], "in which a quote does not end", "it is typed 'cluster.account="),
    (["submit", "cluster.container.image=a#b"], "cannot read the override 'cluster.container.image=a#b'", "quote"),
    (["--multirun", "render", "train.steps=1,2"], "works with submit", "-m"),
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


@pytest.mark.parametrize(("name", "start"), [("surely-not-there", "surely-not-there"), ("/surely/not/there", "NAME")])
def test_a_sandbox_that_does_not_run_is_said_before_anything_is_made(
    name: str, start: str, nothing_left: FakeSlurm, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, hint = refused(["+cluster=sandbox", f"cluster.sandbox={name}", "submit"], capsys)
    assert code == 1
    assert f"the sandbox '{name}' is not running" in said and f"sandbox up --name {start}; " in hint
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


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        *(
            ([verb, "last"], "there are no runs under {here}/runs", "SLURMTRAIN_RUNS")
            for verb in ("status", "logs", "cancel", "preempt", "requeue", "resume")
        ),
        (["train", "."], "{here} is not a run directory", ""),
        (["train", ".", "train.steps=3"], "takes its config only from the run directory", ""),
    ],
)
def test_a_run_that_is_not_there_is_told_with_where_it_was_looked_for(
    words: list[str], sentence: str, hint: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, hinted = refused(words, capsys)
    assert code == EXIT_USAGE and sentence.format(here=project) in said and hint in hinted


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
