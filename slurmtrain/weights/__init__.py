"""Weights out of checkpoints and into them: safetensors, folders of Hugging Face, adapters."""
