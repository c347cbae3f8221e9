"""Models: plain `nn.Module`s that know nothing of ranks; `parallel/` distributes them over a mesh."""

from slurmtrain.models.decoder import Decoder
from slurmtrain.models.initial import Normal, initialize

__all__ = ["Decoder", "Normal", "initialize"]
