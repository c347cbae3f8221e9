"""`--help`: enough to find everything. Plain text from the verb table and the conf folder; nothing heavy is imported."""

from __future__ import annotations

from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.compose import config_groups

PROGRAM = "python -m slurmtrain"


def help_text(verb: str | None = None) -> str:
    """The help of everything, or of one verb that composes a config."""
    if verb is not None:
        found = VERBS[verb]
        return f"{PROGRAM} {found.usage}\n\n  {found.help}\n\n{_groups()}\n\n{HYDRA}"
    verbs = "\n".join(f"  {found.usage}\n      {found.help}" for found in VERBS.values() if not found.hidden)
    return f"""slurmtrain: training jobs on SLURM that finish: submitted by one command, stopped cleanly, resumed exactly.

{PROGRAM} [overrides] VERB [options]        (the verb may stand anywhere; `slurmtrain` is the same)

Verbs. RUN is a run id, a unique beginning of one, a path, or `last`.
{verbs}

{_groups()}

{HYDRA}

Examples
  {PROGRAM} +cluster=local submit                                a run on this machine, one to two minutes
  {PROGRAM} +cluster=local +experiment=smoke submit              a few seconds
  {PROGRAM} sandbox up && {PROGRAM} +cluster=sandbox submit --follow
  {PROGRAM} +cluster=a100x4 cluster.nodes=4 train.steps=100000 submit
  {PROGRAM} +cluster=a100x8 cluster.nodes=8 +parallel=fsdp_tp parallel.tp=4 layout
  {PROGRAM} +cluster=h100x8 +model=llama3_8b +parallel=fsdp layout --memory
  {PROGRAM} +cluster=a100x4 eval=job eval.cluster.time_limit_min=30 eval.metrics.accuracy=true submit
  {PROGRAM} evaluate last --step 1000 eval.sets.wiki='{{_target_: my_package.Wiki}}'
  {PROGRAM} +cluster=a100x4 submit -- python my_train.py --layers 1,2 --lr 1e-3
  {PROGRAM} prepare prepare.inputs='[/data/raw/*.jsonl.zst]' prepare.output=/data/tokens prepare.tokenizer=tokenizer.json
  {PROGRAM} +cluster=a100x4 +secrets.HF_TOKEN=env hooks.on_failure='mail -s "$SLURMTRAIN_SENTENCE" me' submit
"""


def _groups() -> str:
    lines = [f"  {group + '=':<13}{' '.join(options)}" for group, options in config_groups().items()]
    return "Config groups (choose with group=option; single fields with group.field=value)\n" + "\n".join(lines)


HYDRA = f"""Hydra
  {PROGRAM} --cfg job [overrides]          the composed config, with every field there is
  --config-dir DIR   your own configs (DIR/cluster/mine.yaml -> cluster=mine)      --config-name NAME   another primary config
  --config-path DIR  searched first of all, with a primary config of its own
  +key=value adds, ~key removes, ++key=value adds or overrides      --info defaults-tree      --hydra-help
  eval "$(slurmtrain -sc install=bash)"    tab completion"""
