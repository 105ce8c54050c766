"""Structured state-space dual scan."""
