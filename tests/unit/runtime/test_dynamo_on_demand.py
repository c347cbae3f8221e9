"""torch._dynamo is loaded by a program that compiles, and by no other: it costs as much as torch itself."""

from __future__ import annotations

from tests.support.commands import Cli

WORDS = ("+cluster=local", "optim.warmup_steps=0", "train.steps=2", "train.global_batch_size=2", "submit")


def test_a_training_that_does_not_compile_never_imports_it(cli: Cli) -> None:
    done = cli(*WORDS, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in (done.stdout + done.stderr).splitlines()}
    assert "slurmtrain.training.trainer" in loaded
    assert not {"sympy", "torch._dynamo.utils", "torch.distributed.tensor"} & loaded
