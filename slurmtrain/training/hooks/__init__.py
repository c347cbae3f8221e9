"""What hangs on the training loop: one module for each concern, and `base` with their protocol.

`rank/jobs/train.py` lists the hooks of a run. Hooks of your own derive from `TrainingHook` and are named in the config
by `train.hooks`.
"""

from slurmtrain.training.hooks.base import TrainingHook as TrainingHook
