"""The command `python -m spmd_worker.tools.torchrun`: the program of frontends/tools/torchrun.py."""

import sys

from spmd_worker.frontends.tools.torchrun import main

if __name__ == "__main__":
    sys.exit(main())
