"""The command `python -m spmd_worker.tools.collect`: the program of frontends/tools/collect.py."""

import sys

from spmd_worker.frontends.tools.collect import main

if __name__ == "__main__":
    sys.exit(main())
