"""A causal language model of Hugging Face's transformers (extra `hf`) as a plain module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slurmtrain.errors import ConfigError


class HuggingFace(nn.Module):
    """A causal language model: tokens in, logits out, in float32 parameters; nothing is downloaded.

    Args:
        config: fields of the model's configuration, `model_type` among them; the weights are drawn at random.
        path: a folder that `save_pretrained` has written, or a snapshot of one from the hub, whose weights are read.

    Raises:
        ConfigError: transformers is not installed, not exactly one of `config` and `path` is given, or it names no
            model.
    """

    def __init__(self, *, config: Mapping[str, Any] | None = None, path: str | None = None):
        super().__init__()
        if (config is None) == (path is None):
            raise ConfigError(
                "model=huggingface takes either model.config, to draw weights, or model.path, to read them",
                hint="e.g. model.path=/models/Qwen3-8B, or 'model.config={model_type: qwen3, num_hidden_layers: 4}'",
            )
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                "model=huggingface needs transformers, which is not installed", hint="pip install 'slurmtrain[hf]'"
            ) from None
        model: Any = _drawn(transformers, config or {}) if path is None else _read(transformers, path)
        self.model: nn.Module = model.float()
        self.vocab_size: int = model.get_input_embeddings().num_embeddings

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the token that follows each of `tokens_BS` (int64 [B, S])."""
        logits_BSV: Tensor = self.model(tokens_BS, use_cache=False).logits
        return logits_BSV


def _drawn(transformers: Any, config: Mapping[str, Any]) -> nn.Module:
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    except (TypeError, ValueError) as error:  # no model_type, an unknown one, or one that predicts no tokens
        first = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"transformers cannot build model.config={dict(config)}: {first}",
            hint="model_type is that of a config.json, such as llama or qwen3",
        ) from None
    return model


def _read(transformers: Any, path: str) -> nn.Module:
    if not Path(path, "config.json").is_file():
        raise ConfigError(f"model.path={path} has no config.json", hint="name a folder written by save_pretrained")
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    return model
