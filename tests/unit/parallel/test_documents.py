"""Rows packed with several documents: each is computed as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.data.loading.batches import IGNORED_TARGET, filled
from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.models.decoder import CausalAttention, block_mask, dense_mask
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.training.forward_backward import ForwardBackward, build_forward_backward

LENGTHS = [[5, 1, 10, 8], [24], [7, 17]]  # of the documents in each row
DOCUMENTS = torch.tensor(
    [[i for i, length in enumerate(row) for _ in range(length)] for row in LENGTHS], dtype=torch.int32
)
TOKENS = torch.randint(50, DOCUMENTS.shape, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(50, DOCUMENTS.shape, generator=torch.Generator().manual_seed(2))
TARGETS[:, ::5] = IGNORED_TARGET


def decoder(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 24, "qk_norm": True,
    }  # fmt: skip
    return Decoder(**{**sizes, **changes})


def documents_one_by_one() -> Iterator[tuple[int, slice]]:
    """Row and columns of each document."""
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for end, length in zip(ends, lengths, strict=True):
            yield row, slice(end - length, end)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")


def test_each_document_of_a_row_gets_the_logits_that_it_has_alone() -> None:
    model = decoder()
    packed = model(TOKENS, documents=DOCUMENTS)
    for row, columns in documents_one_by_one():
        alone = model(TOKENS[row : row + 1, columns])
        torch.testing.assert_close(packed[row : row + 1, columns], alone, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(packed, model(TOKENS), atol=1e-3)


def test_loss_and_gradients_of_packed_rows_are_those_of_the_documents_one_by_one() -> None:
    packed, alone = decoder(), decoder()
    whole = loss(packed(TOKENS, documents=DOCUMENTS), TARGETS)
    whole.backward()
    total = 0.0
    for row, columns in documents_one_by_one():
        part = loss(alone(TOKENS[row : row + 1, columns]), TARGETS[row : row + 1, columns])
        part.backward()
        total += part.item()
    assert whole.item() == pytest.approx(total, rel=1e-6)
    for ours, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6 * theirs.grad.norm().item())


def test_blocks_let_through_what_the_dense_mask_does() -> None:
    """What a GPU computes, in uncompiled form, and with parts of blocks: rows of 300 in blocks of 128."""
    generator = torch.Generator().manual_seed(3)
    documents = torch.randint(6, (2, 300), generator=generator).sort(dim=1).values.int()
    q, k, v = (torch.randn(2, 300, heads, 16, generator=generator) for heads in (4, 2, 2))
    for positions in (torch.arange(300), torch.arange(150, 300)):  # all, and a rank's stretch
        stretch = q[:, positions]
        with torch.compiler.set_stance("force_eager"):
            blocks = tree_map(lambda leaf: leaf, block_mask(documents, positions))  # as FSDP hands it on
            ours = CausalAttention()(stretch, k, v, 0.0, blocks)
        torch.testing.assert_close(
            ours, CausalAttention()(stretch, k, v, 0.0, dense_mask(documents, positions)), rtol=0, atol=1e-6
        )
        with pytest.raises(ConfigError, match=r"model\.dropout=0\.1"):
            CausalAttention()(stretch, k, v, 0.1, blocks)


def straight(model: nn.Module) -> ForwardBackward:
    distributed_model = DistributedModel(
        model, (model,), (0,), 1, ParallelConfig(), ParallelDims(), 0, torch.device("cpu")
    )
    return build_forward_backward(distributed_model, 1, len(TOKENS))


BATCH = {"inputs": TOKENS, "targets": TARGETS, "documents": DOCUMENTS}


def test_a_pipeline_s_last_batch_is_filled_up_with_rows_that_do_not_count() -> None:
    more = filled(BATCH, 5)
    assert {name: value.shape for name, value in more.items()} == dict.fromkeys(BATCH, (5, 24))
    assert all(torch.equal(value[:3], BATCH[name]) for name, value in more.items())
    assert (more["targets"][3:] == IGNORED_TARGET).all()


class Unaware(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        raise AssertionError("it must not be called")


@pytest.mark.parametrize("kind", [Unaware, HuggingFace])
def test_a_model_that_cannot_tell_documents_apart_is_refused(kind: type[nn.Module]) -> None:
    model = kind.__new__(kind)  # of transformers, which may not be installed, no more than this is needed
    nn.Module.__init__(model)
    with pytest.raises(ConfigError, match="rows of the data hold several documents") as error:
        straight(model).train([BATCH], global_tokens=lambda: 1)
    assert "data.document_mask=false" in (error.value.hint or "")
