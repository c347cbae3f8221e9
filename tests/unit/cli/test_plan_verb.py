"""`plan` on the command line: what a person and a program are told, and what is refused."""

from __future__ import annotations

import math
from typing import Any

from tests.support.commands import refusal
from tests.support.runs import printed, shown

EIGHT_B = [
    *("+cluster=h100x8", "cluster.nodes=16", "model=llama3_8b", "parallel=fsdp", "parallel.param_dtype=bfloat16"),
    *("data.seq_len=8192", "train.global_batch_size=1024", "train.micro_batch_size=1"),
]


def said(words: list[str]) -> str:
    return printed(*words, "plan")


def answer(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = shown(*words, "plan")
    return found


def refused(words: list[str], code: int) -> str:
    return refusal(*words, "plan", code=code)


def test_a_plan_says_what_a_person_asks_before_submitting() -> None:
    text = said([*EIGHT_B, "--tokens", "15T"])
    for words in (
        "16 nodes x 8 H100: 128 ranks = 128 data-parallel groups (128 shards)",
        "8.03 billion parameters, computed in bfloat16",
        "1024 sequences of 8,192 tokens = 8.39 million tokens; 8 micro batches of 1 on each rank",
        " GB of 79.0 on a rank (parameters 0.2, gradients 0.2, optimiser 0.5",
        "The weights alone in 16 bit: 16.1 GB",
        "is best (Daly 2006), for a failure every 9 d 15 h",
        "15 trillion tokens take ",
        "More than 128 nodes cannot share this step",
        "note: 37% of the peak assumed for computation",
        "note: cluster.network_gb_per_s=400 assumed",
    ):
        assert words in text, words


def test_without_gpus_units_are_small_and_without_a_peak_memory_and_saves_are_planned_all_the_same() -> None:
    text = said(["+experiment=smoke", "cluster.tasks_per_node=2", "cluster.peak_tflops=0.1"])
    for words in ("1 node x 2 CPU ranks: 2 ranks", "\ncheckpoint    395 kB (12 bytes", " rank hours, ", "   132 kB   "):
        assert words in text, words
    text = said(["+experiment=smoke"])
    assert "note: no peak is known for CPUs" in text
    assert "memory" in text and "goodput" in text and "step " not in text
    assert answer(["+experiment=smoke"])["step"] is None


def test_a_program_gets_the_same_numbers() -> None:
    found = answer([*EIGHT_B, "--tokens", "1.5e13"])
    assert found["axes"]["dp_shard"] == found["step"]["ranks"] == 128
    assert found["tokens_per_step"] == 1024 * 8192
    step = found["step"]
    assert math.isclose(sum(step["seconds"].values()), step["expected_s"])
    assert [(each["axis"], each["ranks"]) for each in step["traffic"]] == [("dp_shard", 128)]
    assert found["tokens"] == 15 * 10**12 and found["gpu_hours"] > 0
    assert 0.9 < found["goodput"] <= 1
    assert [each["after"]["nodes"] for each in found["more_nodes"]] == [32, 64, 128]
    assert found["sentence"].startswith("More than 128 nodes cannot")


def test_of_a_layout_that_does_not_fit_nothing_but_its_sizes_is_told() -> None:
    words = ["+cluster=h100x8", "model=llama3_405b", "train.global_batch_size=64"]
    text = said(words)
    assert "it does not fit; what would: cluster.nodes=" in text
    assert not [name for name in ("\nstep ", "\nspeed", "\ncost", "nodes  ") if name in text]
    found = answer(words)
    assert (found["fits"], found["step"], found["gpu_hours"], found["more_nodes"]) == (False, None, None, [])
    assert found["would_fit"][0] in text.replace("\n", " ")
