"""The server and a client of OpenAI's package: a completion, then a chat answer as a stream.

    pip install 'spmd-worker[serve]' openai
    python examples/server_client.py [MODEL]

By hand the server is `python -m spmd_worker.serve model.path=MODEL`, and prints its address and key.
"""

import os
import subprocess
import sys

from openai import OpenAI

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
# A port of its own: the server's log says which one, once it answers.
command = [sys.executable, "-m", "spmd_worker.serve", f"model.path={model}", "serve.port=0"]
variables = {**os.environ, "SPMD_WORKER_API_KEY": "my-key"}
server = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
try:
    # A client that lives long reads on: the server waits when the pipe is full.
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if " serving " in line:
            break
    else:
        sys.exit("the server has ended")
    client = OpenAI(base_url=line.split()[-1], api_key="my-key")
    completion = client.completions.create(model=model, prompt="add 123 + 456 =", max_tokens=16, temperature=0)
    print(f"completion:{completion.choices[0].text}")

    messages = [{"role": "user", "content": "sort 42 17 99 ="}]
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    print("streamed: ", end="")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()  # the server answers what is open, then ends
print("server ended with", server.wait())
