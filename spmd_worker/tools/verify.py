"""The command `python -m spmd_worker.tools.verify`: the program of frontends/tools/verify.py."""

import sys

from spmd_worker.frontends.tools.verify import main

if __name__ == "__main__":
    sys.exit(main())
