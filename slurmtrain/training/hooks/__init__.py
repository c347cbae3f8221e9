"""What hangs on the training loop: one module for each concern. `TrainingHook` is the base class of hooks of your own."""

from slurmtrain.training.hooks.base import TrainingHook as TrainingHook
