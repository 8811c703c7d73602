"""The command `python -m spmd_worker.tools.report`: the program of frontends/tools/report.py."""

import sys

from spmd_worker.frontends.tools.report import main

if __name__ == "__main__":
    sys.exit(main())
