"""Ray Train with our checkpoints: a TorchTrainer that goes on with the same bits after a killed, drained or stopped node.

    python jobs/ray_train.py --workers 2 --folder /shared/my-run                      in a Ray cluster
    ray job submit --address http://head:8265 -- python jobs/ray_train.py --workers 2 --folder /shared/my-run

Ray restarts the workers. A drained node (a spot instance that is reclaimed) is announced: the state is saved at once. TERM
to this program, as from `ray job stop`, stops all workers after the same step; they save, and it leaves with 75.
"""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slurmtrain

try:
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer
except ImportError as error:
    print(f"this needs Ray, which cannot be imported: {error}\n  hint: pip install 'slurmtrain[ray]'", file=sys.stderr)
    raise SystemExit(78) from None


def train(options: dict[str, Any]) -> None:
    run = slurmtrain.init()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1)).to(run.device)
    if run.world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + run.rank)  # each rank draws its own samples
    target = torch.linspace(-1, 1, 8, device=run.device)

    stop_file = Path(options["folder"], "stop")
    checkpointer = slurmtrain.Checkpointer(Path(options["folder"], "checkpoints"))
    restored = checkpointer.restore(model=model, optimizer=optimizer)
    announced = False
    for step in range(restored.step if restored else 0, options["steps"]):
        inputs = torch.randn(32, 8).to(run.device)
        loss = (model(inputs).squeeze(1) - torch.sin(inputs @ target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options["pause"])
        if run.rank == 0:
            print(f"step {step + 1}/{options['steps']}  loss {loss.item():.6f}", flush=True)
        drained = ray.train.get_preemption_info() is not None  # the same answer on every rank
        stop = slurmtrain.should_stop(asked=stop_file.exists())
        done = step + 1
        if stop or (drained and not announced) or done % options["every"] == 0 or done == options["steps"]:
            checkpointer.save(done, model=model, optimizer=optimizer)
        if stop:
            break
        announced = drained
    checkpointer.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="on storage that all nodes share")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    stop_file = options.folder / "stop"
    stop_file.unlink(missing_ok=True)
    ray.init()  # before the next line: it handles TERM, too
    signal.signal(signal.SIGTERM, lambda *_: stop_file.touch())
    TorchTrainer(
        train,
        train_loop_config={**vars(options), "folder": str(options.folder.absolute())},
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers, use_gpu=options.gpu, placement_strategy="STRICT_SPREAD"
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(options.folder.absolute()), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
    return 75 if stop_file.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main())
