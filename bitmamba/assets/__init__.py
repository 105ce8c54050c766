"""Bundled base model, tokenizer, examples and replay text; README.md has origins."""
