"""Lets the tests here import `ssd_cases`, the inputs and the truth they share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
