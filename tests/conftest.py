"""Settings for every test: one thread a process, property tests that repeat, helpers of tests/ importable by name.

Imports no torch, so that the tests of torch-free code do not wait for it.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# Read by torch when it is imported. Ranks share the cores, and one thread is how torchrun starts them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

TESTS = str(Path(__file__).resolve().parent)
if TESTS not in sys.path:
    # pytest's default import mode does the same; with this, `import ranks` holds under the others too.
    sys.path.append(TESTS)

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
