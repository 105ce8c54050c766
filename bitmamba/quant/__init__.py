"""Weights at few bits: codes, scales and their storage."""
