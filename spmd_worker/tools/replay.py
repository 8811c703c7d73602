"""The command `python -m spmd_worker.tools.replay`: the program of frontends/tools/replay.py."""

import sys

from spmd_worker.frontends.tools.replay import main

if __name__ == "__main__":
    sys.exit(main())
