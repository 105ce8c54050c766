"""Depthwise causal convolution along the sequence."""
