"""Ten kinds of rows that no job can answer, each with an error code of its own. Knows nothing about who reads them."""

import json
from collections.abc import Callable

BAD_ROWS: tuple[Callable[[int], str], ...] = (
    lambda number: f'{{"prompt": "cut off {number}',
    lambda number: json.dumps({"custom_id": f"bad-{number}", "max_tokens": 3}),
    lambda number: json.dumps({"prompt": "one", "messages": [{"role": "user", "content": "two"}]}),
    lambda number: json.dumps({"prompt": "add 1 2 =", "max_tokens": -number - 1}),
    lambda number: json.dumps({"prompt": "add 1 2 =", "max_token": 3}),
    lambda number: json.dumps({"prompt": "copy a " * 400}),
    lambda number: json.dumps({"prompt_token_ids": [65, 100_000 + number]}),
    # The id of the first good row.
    lambda number: json.dumps({"custom_id": "row-0", "prompt": "add 1 2 ="}),
    lambda number: json.dumps(
        {"custom_id": f"bad-{number}", "method": "POST", "url": "/v1/responses", "body": {"input": "x"}}
    ),
    lambda number: json.dumps({"custom_id": f"empty-{number}", "prompt": ""}),
)
"""Row number -> a line: not JSON; no prompt; two prompts; a value out of range; an unknown key; a prompt longer than
the model; a token outside the vocabulary; an id used twice; a url that does not exist here; a prompt without tokens.
"""
