"""Hooks of training: each is called where it says, and costs nothing where it does nothing."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.training.hooks.base import TrainingHook, TrainingHooks

EVENTS = [name for name in vars(TrainingHook) if not name.startswith("_")]
STATE: Any = None  # these hooks look at nothing


class Noting(TrainingHook):
    """Notes the calls of the two endings and of the two questions."""

    def __init__(self, name: str, calls: list[str], answer: bool = False):
        self._name, self._calls, self._answer = name, calls, answer

    def wants_save(self, state: Any) -> bool:
        self._calls.append(self._name)
        return self._answer

    def gives_up(self, state: Any) -> bool:
        self._calls.append(self._name)
        return self._answer

    def close(self, state: Any) -> None:
        self._calls.append(self._name)
        if self._answer:
            raise OSError("no space left on device")

    on_error = close


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_the_hooks_that_override_it_in_their_order_and_no_others(event: str) -> None:
    calls: list[str] = []

    def hook(name: str) -> TrainingHook:
        made: TrainingHook = type(name, (TrainingHook,), {event: lambda self, *arguments: calls.append(name)})()
        return made

    hooks = TrainingHooks([TrainingHook(), hook("first"), TrainingHook(), hook("second")])
    method = getattr(hooks, event)
    method(*[STATE] * (method.__code__.co_argcount - 1))
    assert calls == (["second", "first"] if event == "close" else ["first", "second"])
    assert [len(called) for name, called in hooks._of.items() if name != event] == [0] * (len(EVENTS) - 1)


def test_each_hook_is_asked_whatever_the_one_before_it_has_answered() -> None:
    calls: list[str] = []
    hooks = TrainingHooks([Noting("first", calls, answer=True), Noting("second", calls)])
    assert hooks.wants_save(STATE) and hooks.gives_up(STATE)
    assert calls == ["first", "second"] * 2
    assert not TrainingHooks([Noting("only", calls)]).wants_save(STATE) and not TrainingHooks([]).gives_up(STATE)


@pytest.mark.parametrize("event", ["on_error", "close"])
def test_every_hook_hears_of_an_ending_even_if_one_of_them_fails(event: str) -> None:
    calls: list[str] = []
    failing = [Noting("first", calls, answer=True), Noting("second", calls, answer=True)]
    with pytest.raises(OSError, match="no space"):
        getattr(TrainingHooks(failing), event)(STATE)
    assert calls == (["second", "first"] if event == "close" else ["first", "second"])
