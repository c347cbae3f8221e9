"""The fields of a config that a run may change while it keeps its checkpoints, and what a change means. Pure decisions.

What a checkpoint holds was computed with a model, on samples in an order, in steps of a global batch. Another value of such a
field would leave the numbers as they are and change what they stand for, so it is refused, with the reason. All else may
change: resources, the length of training, learning rates, what is saved, logged and evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.choices import Allow, JobKind
from slurmtrain.config.frozen import to_values
from slurmtrain.config.known_models import is_our_decoder
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.planner.schedule import learning_rate

Values = tuple[Any, Any]  # a field's value before and after

# Of our own decoder and of adapters, fields that change what is computed from now on, not what the weights stand for.
DROPOUT = ("model.dropout", "lora.dropout")
# Of prepared data, fields that change nothing about the samples of training.
OF_ANY_DATA = ("valid_split", "evals", "verify", "valid_each", "tokenizer_sha256")
# Fields, and groups of them, that a checkpoint's numbers are numbers of -> why they cannot change.
_ORDER = "its place among the samples is a number in the order that `data`, train.seed and train.shuffle give"
_WEIGHTS = "its weights and the state of its optimiser are those of the model as it was"
_BASE = "its adapters were trained beside the weights of that folder, which every start reads from there"
_STEPS = "its steps, its schedule and its place among the samples are counted in global batches"
_OWN = "it goes on from its own checkpoints, so this would have no effect"
MEANING = {
    "model": _WEIGHTS,
    "lora": _WEIGHTS,
    "data": _ORDER,
    "train.seed": _ORDER,
    "train.shuffle": _ORDER,
    "train.length_sorted_steps": _ORDER,
    "train.global_batch_size": _STEPS,
    "checkpoint.restore_from": _OWN,
    "checkpoint.restore_only": _OWN,
}
RELATIVE = re.compile(r"(\+{0,2}train\.steps)=\+(\d+)")
OF_SCHEDULE = ("train.steps", "optim.lr", "optim.warmup_steps", "optim.min_lr_ratio")
ABSENT = "(not there)"


def differences(before: Config, after: Config) -> dict[str, Values]:
    """Return the fields with other values, by dotted key.

    A list is one value. A field that only one config has is ABSENT in the other.
    """
    old, new = dict(_leaves(to_values(before))), dict(_leaves(to_values(after)))
    return {
        key: (old.get(key, ABSENT), new.get(key, ABSENT))
        for key in {**old, **new}
        if key not in old or key not in new or old[key] != new[key]
    }


def check_meaning(before: Config, after: Config, step: int | None) -> None:
    """Check that a change leaves what the run's checkpoints hold as it is.

    Args:
        step: the step of the newest checkpoint; None: there is none, and all may change.

    Raises:
        UsageError: it does not; the message gives the field, its values and the reason.
    """
    if step is None or after.job.kind != JobKind.TRAIN:
        return
    changes = differences(before, after)
    for key, values in changes.items():
        reason = _reason(key, before)
        if reason is None or (Allow.CONFIG in after.checkpoint.allow and reason != _OWN):
            continue
        hint = "submit it as a separate run"
        if reason != _OWN:
            hint += (
                ", with these weights if you like (checkpoint.restore_from=CHECKPOINT checkpoint.restore_only=model); "
                "checkpoint.allow=[config,data] in the same command goes on at this step all the same"
            )
        raise UsageError(f"{key}: {told(values)} cannot change after step {step} of the run: {reason}", hint=hint)
    if after.train.steps < step:
        raise UsageError(
            f"train.steps={after.train.steps} is less than {step}, the steps that the run has done",
            hint=f"train.steps={step} ends it here, train.steps=+100 goes on",
        )


def _reason(key: str, before: Config) -> str | None:
    """Return why a field cannot change; None if it can."""
    group = key.partition(".")[0]
    if key in DROPOUT or (group == "data" and key.rpartition(".")[2] in OF_ANY_DATA):
        return None
    if key == "model.path" and before.lora.r:
        return _BASE
    if group == "model" and not is_our_decoder(before.model) and key != "model._target_":
        return None  # we cannot know what it means; names and shapes of the tensors are compared at the restore
    return MEANING.get(key) or MEANING.get(group)


def with_steps(overrides: Sequence[str], config: Config) -> list[str]:
    """Return the overrides with train.steps=+N replaced by that many steps more than the config has."""
    found = []
    for word in overrides:
        match = RELATIVE.fullmatch(word)
        found.append(f"{match.group(1)}={config.train.steps + int(match.group(2))}" if match else word)
    return found


def describe(before: Config, after: Config, step: int | None) -> list[str]:
    """Return a line for each changed field, and what becomes of the learning rate.

    Args:
        step: steps that the run has done; None: none yet.
    """
    changes = differences(before, after)
    lines = [f"{key}: {told(values)}" for key, values in changes.items()]
    if step and after.job.kind == JobKind.TRAIN and any(key in changes for key in OF_SCHEDULE):
        rates = [learning_rate(step, total_steps=config.train.steps, config=config.optim) for config in (before, after)]
        lines.append(
            f"learning rate of step {step + 1}: {rates[0]:.3g} -> {rates[1]:.3g}, on the schedule of "
            f"train.steps={after.train.steps} and optim.lr={after.optim.lr:g} from here on"
        )
    return lines


def told(values: Values) -> str:
    """Return a change as a person reads it: "200 -> 300"."""
    return " -> ".join("null" if value is None else str(value) for value in values)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
