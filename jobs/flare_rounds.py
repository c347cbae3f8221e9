"""Federated rounds with NVIDIA FLARE: at each site, a round is one run of ours that goes on for some more steps.

    python jobs/flare_rounds.py --rounds 3 --steps 100 +cluster=local model=small        two sites, FLARE's simulator

FLARE sends the global weights, and averages what the sites send back. Each site keeps its own run directory: the state of
its optimiser, its place in the data and its checkpoints stay there, and a round that is preempted goes on from them.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import TrainingState

HERE = Path(__file__).resolve()
try:
    from nvflare.apis.fl_context import FLContext
    from nvflare.app_common.abstract.model import make_model_learnable
    from nvflare.app_common.abstract.model_persistor import ModelPersistor
except ImportError:  # on the nodes where a site trains: they load this file for `GlobalWeights` only
    ModelPersistor = object


class GlobalWeights(TrainingHook):
    """Begins a round with the global weights; an attempt that goes on within the round has its own from its checkpoint."""

    def __init__(self, file: str):
        self.file = file

    def start(self, state: TrainingState) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        with safe_open(self.file, framework="pt") as file:
            if int(file.metadata()["step"]) == state.step:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
                if weights:
                    whole = StateDictOptions(full_state_dict=True)
                    set_model_state_dict(state.distributed_model.model, weights, options=whole)


class SafetensorsFile(ModelPersistor):
    """Keeps the global weights of FLARE's server in a file; without one, the sites begin with `train.seed`."""

    def __init__(self, file: str):
        super().__init__()
        self.file = file

    def load_model(self, fl_ctx: "FLContext") -> Any:
        from safetensors.numpy import load_file

        return make_model_learnable(load_file(self.file) if Path(self.file).exists() else {}, {})

    def save_model(self, model: Any, fl_ctx: "FLContext") -> None:
        from safetensors.numpy import save_file

        save_file(model["weights"], self.file)


def site(folder: Path, steps: int, overrides: list[str]) -> None:
    """What FLARE starts at each site."""
    import nvflare.client as flare
    from safetensors.numpy import load_file, save_file

    flare.init()
    own = folder / flare.get_site_name()
    own.mkdir(parents=True, exist_ok=True)
    start, result = own / "global.safetensors", own / "site.safetensors"
    hook = f'[{{_target_: {HERE.stem}.GlobalWeights, file: "{start}"}}]'
    while flare.is_running():
        model = flare.receive()
        first = model.current_round * steps
        save_file(model.params, start, metadata={"step": str(first)})
        runs = list(own.glob("runs/*/*/run.json"))
        if runs:  # an absolute number, so that a site that is started again within a round does not do more
            words = ["resume", str(runs[0].parent), f"train.steps={first + steps}"]
        else:
            words = [*overrides, f"train.steps={steps}", f"train.hooks={hook}", f"job.runs_dir={own}/runs", "submit"]
        while (code := call(*words)) == 75:  # it was told to stop, and has saved
            words = ["resume", str(next(own.glob("runs/*/*/run.json")).parent)]
        if code:
            raise RuntimeError(f"round {model.current_round} of {own.name} has ended with {code}")
        run = next(own.glob("runs/*/*/run.json")).parent
        result.unlink(missing_ok=True)
        call("checkpoints", str(run), "export", str(result))
        flare.send(flare.FLModel(params=load_file(result), meta={"NUM_STEPS_CURRENT_ROUND": steps}))


def call(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "slurmtrain", *words], cwd=HERE.parent).returncode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--folder", type=Path, default=Path("federated"))
    parser.add_argument("--site", action="store_true", help="what FLARE itself adds")
    options, overrides = parser.parse_known_args()
    folder = options.folder.absolute()
    if options.site:
        return site(folder, options.steps, overrides)
    if ModelPersistor is object:
        print("this needs NVIDIA FLARE\n  hint: pip install 'slurmtrain[flare]'", file=sys.stderr)
        raise SystemExit(78)
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

    job = FedJob("rounds", min_clients=2)
    job.to_server(FedAvg(num_clients=2, num_rounds=options.rounds, allow_empty_global_weights=True))
    job.to_server(SafetensorsFile(str(folder / "global.safetensors")), id="persistor")
    words = ["--site", f"--folder={folder}", f"--steps={options.steps}", *overrides]
    job.to_clients(ScriptRunner(str(HERE), script_args=" ".join(words), framework=FrameworkType.NUMPY))
    raise SystemExit(job.simulator_run(str(folder / "flare"), n_clients=2))


if __name__ == "__main__":
    main()
