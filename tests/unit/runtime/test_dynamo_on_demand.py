"""torch._dynamo is loaded by a program that compiles, and by no other: it costs as much as torch itself."""

from __future__ import annotations

import subprocess
import sys

# What a rank of replicas does until its first step, in a process of its own.
TRAINS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from slurmtrain.models import Decoder
from slurmtrain.runtime.dynamo_on_demand import load_dynamo_on_demand

load_dynamo_on_demand()
from slurmtrain.runtime.jobs.build_model import fill

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torch.device("meta"):
    model = Decoder(vocab_size=8, dim=8, n_layers=1, n_heads=2, max_seq_len=8)
model = nn.parallel.DistributedDataParallel(fill(model, torch.device("cpu"), 1))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
loaded = {"sympy", "torch._dynamo.utils", "torch.distributed.tensor"} & set(sys.modules)
assert not loaded, loaded
"""
COMPILES = """
compiled = torch.compile(lambda x: 2 * x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
outer = torch.compile(model, backend="eager")
outer(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
optimizer.step()
optimizer.zero_grad()
import torch._dynamo
assert not torch._dynamo.is_compiling() and torch._dynamo.explain is sys.modules["torch._dynamo"].explain
"""


# What others may do first, each in a process that was forked when nothing was loaded yet.
IMPORTS = """
for first in (
    "import torch._dynamo.config as config; assert config is torch._dynamo.config and not config.suppress_errors",
    "from torch._dynamo import disable; assert disable is sys.modules['torch._dynamo'].disable, disable",
):
    child = os.fork()
    if child == 0:
        exec(first)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, first
"""


def test_replicas_train_without_it_and_whoever_wants_it_has_it() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{TRAINS}\n{IMPORTS}\n{COMPILES}\nprint('sound')"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "sound\n", done.stderr
