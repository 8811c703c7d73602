"""The command `python -m spmd_worker.tools.doctor`: the program of frontends/tools/doctor.py."""

import sys

from spmd_worker.frontends.tools.doctor import main

if __name__ == "__main__":
    sys.exit(main())
