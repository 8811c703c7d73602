"""Seed of the stress tier: TESTS_SEED, which scripts/test.sh --stress prints.

The same number draws the same kills, moments, states and calls; another draws others.
"""

import os
from typing import Final

SEED: Final = int(os.environ.get("TESTS_SEED", "1"))
