"""What the fork server of `gloo` has, for all its ranks. Not to be imported elsewhere: whoever does ends with its parent."""

from __future__ import annotations

import importlib
import os
import signal

from slurmtrain.config.compose import compose
from slurmtrain.system.process import end_with_parent

MODULES = ["slurmtrain.rank.jobs.train", "slurmtrain.rank.main"]
# What DDP, FSDP and pipelines load when they are first used, seconds for each rank.
MODULES += ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining"]
for module in MODULES:
    importlib.import_module(module)
compose(["experiment=smoke"])  # Hydra looks for its plugins once

# Each rank holds an end of the pipe by which a fork server knows that it is needed. So when pytest was interrupted, a rank that
# waited or was stopped kept the server, and the server the tracker of resources. Now the kernel ends both.
SERVER = os.getpid()
end_with_parent(signal.SIGKILL)
