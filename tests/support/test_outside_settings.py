"""No setting of the product from outside reaches a test."""

import os
import re

from outside_settings import SETTINGS, drop_settings
from ranks import REPOSITORY

NAME = re.compile(r"SPMD_WORKER_[A-Z_]+")


def test_settings_from_outside_are_dropped():
    environment = {**dict.fromkeys(SETTINGS, "1"), "SPMD_WORKER_KILLS": "3"}
    drop_settings(environment)
    assert environment == {"SPMD_WORKER_KILLS": "3"}
    assert not {*SETTINGS} & {*os.environ}


def test_every_setting_of_the_product_is_dropped():
    sources = [*(REPOSITORY / "spmd_worker").rglob("*.py"), *(REPOSITORY / "kv_cache").rglob("*.py")]
    assert {name for path in sources for name in NAME.findall(path.read_text())} == {*SETTINGS}
