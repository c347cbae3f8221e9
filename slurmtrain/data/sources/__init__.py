"""Where samples come from: files of text, prepared data, mixtures."""
