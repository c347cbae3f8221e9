"""Prepared data on disk: manifest, shards, tokenizers, and how samples are cut from them."""
