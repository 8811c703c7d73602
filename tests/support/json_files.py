"""Files of JSON that a test changes in place."""

import json
from pathlib import Path
from typing import Any


def edit(path: Path, **changes: Any) -> None:
    """Keys of a JSON file; `...` takes one out."""
    values = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
