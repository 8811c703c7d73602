"""A batch job from start to end: writes rows, runs launch.py on them, reads the answers.

    python examples/batch_job.py [MODEL]

On two ranks the command is `torchrun --nproc-per-node 2 launch.py parallel.tensor_parallel_size=2 ...`.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
prompts = {"sum": "add 123 + 456 =", "numbers": "sort 42 17 99 =", "letters": "reverse a b c ="}

with TemporaryDirectory() as scratch:
    rows, answers = Path(scratch, "rows.jsonl"), Path(scratch, "answers.jsonl")
    with rows.open("w") as file:
        for name, prompt in prompts.items():
            file.write(json.dumps({"custom_id": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}) + "\n")
        file.write('{"custom_id": "bad", "prompt": 7}\n')  # becomes an error row; the job goes on

    job = [f"model.path={model}", f"job.input={rows}", f"job.output={answers}"]
    subprocess.run([sys.executable, "launch.py", *job], check=True)

    # One line for each row, in the order of the input.
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        if answer["error"]:
            print(f"{answer['custom_id']}: error {answer['error']['code']}")
        else:
            print(f"{answer['custom_id']}: {prompts[answer['custom_id']]}{answer['outputs'][0]['text']}")
    metrics = json.loads(Path(f"{answers}.run", "metrics.json").read_text())
    print(f"{metrics['rows']} rows, {metrics['error_rows']} error row")
