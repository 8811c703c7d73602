"""Has torch's store for ranks that tests fork, as torchrun has it for its own. Prints the port; lives until killed."""

import time

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while True:
    time.sleep(3600)
