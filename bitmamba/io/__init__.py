"""Files: checkpoints, tokenizers and metrics. Orbax is imported here only."""
