"""A causal language model of Hugging Face's transformers (extra `hf`) as a plain module."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurmtrain.errors import ConfigError
from slurmtrain.planner.flops import FROZEN, TRAINED, ModelFlops, attention_flops

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # fields of models that use some matrices only
PREFIX = "model."  # of the names of its parameters, before those that transformers gives them


class HuggingFace(nn.Module):
    """A causal language model: tokens in, logits out, in float32 parameters; nothing is downloaded.

    With `path` its parameters are on the meta device, and take no memory: `weights.pretrained` fills those that a rank holds.

    Args:
        config: fields of the model's configuration, `model_type` among them; the weights are drawn at random.
        path: a folder that `save_pretrained` has written, or a snapshot of one from the hub, with weights to begin with.

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
        if path is not None and not Path(path, "config.json").is_file():
            what = " has no config.json" if Path(path).is_dir() else ": there is no such folder"
            raise ConfigError(f"model.path={path}{what}", hint="name a folder written by save_pretrained")
        model: Any = _built(config, path, on_meta=path is not None)
        self.model: nn.Module = model.float()
        self.vocab_size: int = model.get_input_embeddings().num_embeddings

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the token that follows each of `tokens_BS` (int64 [B, S])."""
        logits_BSV: Tensor = self.model(tokens_BS, use_cache=False).logits
        return logits_BSV

    def training_flops(self) -> ModelFlops | None:
        """Return the operations of a training step, see `planner.shape`; None: not all matrices are used for each token."""
        config: Any = getattr(self.model.config, "text_config", self.model.config)
        sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size")
        layers, heads, width = (getattr(config, name, None) for name in sizes)
        if not (layers and heads and width) or any(getattr(config, name, None) for name in EXPERTS):
            return None
        output = getattr(self.model, "get_output_embeddings", lambda: None)()
        predicting = getattr(output, "weight", None)
        looked_up = {
            id(module.weight)
            for module in self.model.modules()
            if isinstance(module, nn.Embedding) and module.weight is not predicting
        }
        multiplied = [each for each in self.model.parameters() if each.ndim == 2 and id(each) not in looked_up]
        per_token = sum(each.numel() * (TRAINED if each.requires_grad else FROZEN) for each in multiplied)
        head_dim = getattr(config, "head_dim", None) or width // heads
        return ModelFlops(per_token, attention_flops(layers, heads, head_dim))

    @staticmethod
    def stored_name(name: str) -> str:
        """Return the name in a folder of Hugging Face of one of this module's parameters."""
        return name.removeprefix(PREFIX)


def _built(config: Mapping[str, Any] | None, path: str | None, *, on_meta: bool) -> Any:
    """Return the model that a config, or the config.json in a folder, describes.

    Args:
        on_meta: its parameters are on the meta device. Its buffers are not: those that are in no file (rotary frequencies)
            are computed once only, when a module is built.
    """
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError as error:
        raise ConfigError(
            f"model=huggingface needs {error.name}, which is not installed", hint="pip install 'slurmtrain[hf]'"
        ) from None
    auto: Any = transformers.AutoConfig
    try:
        described = (
            auto.for_model(**config or {}) if path is None else auto.from_pretrained(path, local_files_only=True)
        )
        with ExitStack() as stack:
            if on_meta:
                stack.enter_context(_without_drawing())
                stack.enter_context(init_empty_weights(include_buffers=False))
            model: Any = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
        model.tie_weights()  # which not drawing leaves out; behind it, since it makes a new parameter of each that is set
    except (TypeError, ValueError, OSError) as error:  # no model_type, an unknown one, or one that predicts no tokens
        first = str(error).splitlines()[0][:200]
        what = f"model.config={dict(config or {})}" if path is None else f"the model of model.path={path}"
        raise ConfigError(
            f"transformers cannot build {what}: {first}",
            hint="model_type is that of a config.json, such as llama or qwen3",
        ) from None
    return model


def stored_names(config: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return config.json and the names of the tensors, a tied one once, in a folder of the model that `config` describes.

    It takes no memory and no weights.

    Raises:
        ConfigError: transformers cannot build it, or names or joins its tensors otherwise when it writes them.
    """
    model = _built(config, None, on_meta=True)
    names = {name for name, _ in model.named_parameters()}  # a parameter of several names is given once
    values = model.state_dict()
    names |= {name for name, _ in model.named_buffers() if name in values}
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # transformers 4 writes tensors as they are
        pass
    else:
        renamed = loading.revert_weight_conversion(model, {name: values[name] for name in names}).keys() - names
        if renamed:
            raise ConfigError(
                f"transformers writes {min(renamed)} and others under other names, or joined otherwise, than it trains them",
                hint="export to a file, FILE.safetensors, and load that into the model, whose save_pretrained writes the "
                "folder",
            )
    return {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}, names


def _without_drawing() -> AbstractContextManager[None]:
    try:
        module = importlib.import_module("transformers.initialization")
    except ImportError:  # transformers 4
        module = importlib.import_module("transformers.modeling_utils")
    context: AbstractContextManager[None] = module.no_init_weights()
    return context
