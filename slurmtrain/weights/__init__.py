"""Weights out of checkpoints, and into models: safetensors, folders of Hugging Face, adapters."""
