"""The server and a client of OpenAI's package: a completion, then a chat answer as a stream.

    pip install 'spmd-worker[serve]' openai
    python examples/server_client.py [MODEL]

By hand the server is `python -m spmd_worker.serve model.path=MODEL`, and prints its address and key.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
with socket.socket() as probe:  # a port that is free now
    probe.bind(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{probe.getsockname()[1]}"

command = [sys.executable, "-m", "spmd_worker.serve", f"model.path={model}", f"serve.port={address.split(':')[-1]}"]
server = subprocess.Popen(command, env={**os.environ, "SPMD_WORKER_API_KEY": "my-key"})
try:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health")
            break
        except urllib.error.URLError:
            time.sleep(0.1)
    client = OpenAI(base_url=f"{address}/v1", api_key="my-key")
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
