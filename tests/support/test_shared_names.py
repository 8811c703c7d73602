"""Names of shared memory are of the processes that use them."""

import mmap
import os
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import pytest
from shared_names import FOLDER, living_pids, shared_names


@pytest.mark.parametrize("way", ["open", "mapped", "named", "in a folder"])
def test_own_names_are_found_and_no_others(way: str):
    own, other = [os.getpid()], [os.getppid()]
    with TemporaryDirectory(dir=FOLDER, prefix="test-") as folder:
        place = folder if way == "in a folder" else FOLDER
        with NamedTemporaryFile(dir=place, prefix=f"test-{own[0]}-" if way == "named" else "test-") as file:
            name = Path(file.name).relative_to(FOLDER).parts[0]
            file.write(b"x")
            file.flush()
            if way != "mapped":
                assert name in shared_names(own) & shared_names(living_pids())
                assert name not in shared_names(other)
                return
            with mmap.mmap(file.fileno(), 1):
                file.file.close()
                assert name in shared_names(own) - shared_names(other)
            assert name not in shared_names(own)
