"""What the stress tier draws from: TESTS_SEED, a number, which scripts/test.sh --stress names.

The same number draws the same kills, moments, states and calls; another draws others.
"""

import os
from typing import Final

SEED: Final = int(os.environ.get("TESTS_SEED", "1"))
