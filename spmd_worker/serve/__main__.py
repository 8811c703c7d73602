"""The command `python -m spmd_worker.serve`: the server of frontends/serve."""

import os
import sys

from spmd_worker.base.process import end_with_launcher
from spmd_worker.base.standard_streams import open_standard_streams
from spmd_worker.worker.memory.garbage import hold_collections

if __name__ == "__main__":
    # Before anything that takes its time: a rank must not outlive its launcher.
    end_with_launcher()
    open_standard_streams()
    hold_collections()
    # A long prompt is encoded alongside the steps (`Tokenizer.encode`).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from spmd_worker.frontends.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
