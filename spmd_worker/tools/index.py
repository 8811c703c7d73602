"""The command `python -m spmd_worker.tools.index`: the program of frontends/tools/index.py."""

import sys

from spmd_worker.frontends.tools.index import main

if __name__ == "__main__":
    sys.exit(main())
