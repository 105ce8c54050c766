"""Tests run on the CPU, and see the repository's own packages."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
