"""One rank that is told is enough, and all stop at the same step."""

from __future__ import annotations

import os
import signal

from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.system import signals
from slurmtrain.system.signals import StopCause
from tests.support.gloo import GlooRanks


def step_until_told(distributed: DistributedContext, told_rank: int, told_at: int, between: bool) -> tuple[int, str]:
    stop = signals.install_signal_handlers()
    agreement = StopAgreement(stop, distributed.control_group)

    def tell(step: int) -> None:
        if distributed.environment.rank == told_rank and step == told_at:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.wait(60)

    step = 0
    while step < 100:
        if not between:
            tell(step)
        agreement.begin()
        if between:
            tell(step)
        if agreement.finish().stop:
            break
        step += 1
    first = stop.first
    assert first is not None
    return step, first.cause


def test_when_one_rank_is_told_all_stop_after_the_same_step(gloo_ranks: GlooRanks) -> None:
    answers = gloo_ranks(4, step_until_told, 2, 7, False)
    assert answers == [(7, "another rank"), (7, "another rank"), (7, "SIGUSR2"), (7, "another rank")]


def test_a_signal_after_the_ranks_have_handed_in_their_flags_stops_all_one_step_later(gloo_ranks: GlooRanks) -> None:
    assert [step for step, _ in gloo_ranks(2, step_until_told, 0, 3, True)] == [4, 4]


def test_a_single_process_stops_at_the_step_in_which_it_was_told() -> None:
    stop = signals.StopFlag()
    agreement = StopAgreement(stop, None)
    agreement.begin()
    assert not agreement.finish().stop
    stop.request(StopCause.DEADLINE)
    agreement.begin()
    assert agreement.finish()
    assert stop.first is not None
    assert stop.first.cause == "deadline"


def test_a_checkpoint_that_was_asked_for_waits_for_a_moment_for_one() -> None:
    asked = [True, False]
    agreement = StopAgreement(signals.StopFlag(), None, lambda: asked.pop(0))
    agreement.begin()  # in the midst of an evaluation, say
    assert not agreement.finish().save
    agreement.begin(save=False)
    assert agreement.finish().save
    agreement.begin(save=False)
    assert not agreement.finish().save
