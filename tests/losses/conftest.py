"""Lets the tests here import `kl_reference`, the truth they share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
