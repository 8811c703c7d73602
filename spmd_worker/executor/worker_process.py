"""Worker process of the multiprocess executor: runs the tasks of its queue one after another and answers each.

Started by `worker_handle.py` with its end of a socket pair. Ends on request, and at once when the driver is gone. The
worker imports torch, once this process has its environment; this module does not.
"""

import argparse
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import Any, Final

from spmd_worker.base.metrics.log import LOGGER_NAME, configure_logging
from spmd_worker.base.process import end_with_parent
from spmd_worker.base.standard_streams import open_standard_streams
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.executor.worker_channel import FrameKind, receive_piece
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.ranks.transport.frames import Frame, FrameParser, PeerGoneError, send_frame
from spmd_worker.replica.lockstep.wire.codec import Decoder
from spmd_worker.replica.sequence.step import StepResult
from spmd_worker.worker.memory.host import keep_freed_memory
from spmd_worker.worker.worker_wrapper import WorkerWrapper

logger = logging.getLogger(__name__)

DRIVER_GONE_EXIT_CODE: Final = 1

_SETUP_METHODS: Final = ("adjust_rank", "initialize_from_config", "init_worker", "update_environment_variables")


def main() -> int:
    """Run this process's tasks. Returns the exit code."""
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="spmd-worker process")
    for name in ("--rank", "--descriptor", "--driver-pid", "--log-level"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    # On other systems `_receive` sees the end of the task queue.
    end_with_parent(given.driver_pid)
    # Ctrl-C and the end of a terminal reach every process of it: only the driver handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    keep_freed_memory()
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not replaced in this process
    _configure_logging(given.rank, given.log_level)
    connection = socket.socket(fileno=given.descriptor)
    connection.set_inheritable(False)
    tasks: SimpleQueue[Frame] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), name="spmd-tasks", daemon=True).start()
    WorkerTasks(connection, given.rank).run(tasks)
    return 0


class WorkerTasks:
    """Runs the tasks of this process."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._wrapper = WorkerWrapper(rpc_rank=rank)
        self._decoder = Decoder()
        self._output_rank = 0

    def run(self, tasks: "SimpleQueue[Frame]") -> None:
        while True:
            task = tasks.get()
            kind, payload = self._answer(task)
            send_frame(self._connection, kind, task.number, payload)
            if task.kind is FrameKind.STOP:
                return

    def _answer(self, task: Frame) -> tuple[FrameKind, bytes]:
        method = task.kind.name.lower()
        try:
            if task.kind is FrameKind.STEP:
                return FrameKind.RESULT, encode_value(self._step(task.payload))
            if task.kind is FrameKind.STOP:
                if self._wrapper.worker is not None:
                    self._wrapper.execute_method("shutdown")
                return FrameKind.RESULT, encode_value(None)
            method, args, kwargs = decode_value(task.payload)
            call = self._set_up if task.kind is FrameKind.SETUP else self._wrapper.execute_method
            return FrameKind.RESULT, encode_value(call(method, *args, **kwargs))
        except Exception as error:  # the driver raises it in the caller
            logger.debug("rank %d: %s failed", self._wrapper.rpc_rank, method, exc_info=True)
            return FrameKind.FAILURE, encode_value((type(error).__name__, str(error), traceback.format_exc()))

    def _set_up(self, method: str, *args: Any) -> None:
        assert method in _SETUP_METHODS, method
        if method == "init_worker":
            resolved = args[0][self._wrapper.rpc_rank]["resolved"]
            self._output_rank = output_rank(resolved.layout)
            self._num_shards = resolved.layout.tensor_parallel_size
            self._decoder = Decoder(resolved.num_in_flight)
        getattr(self._wrapper, method)(*args)

    def _step(self, payload: bytes) -> StepResult:
        """Forward pass and sampling of one message. Only the output rank returns ids; all return the checksums of their
        masks, which are compared, and the first of each stage the experts of its layers.
        """
        plan = self._decoder.decode(payload).plan
        result = self._wrapper.execute_method("execute_model", plan)
        if result is None:
            result = self._wrapper.execute_method("sample_tokens")
        assert isinstance(result, StepResult), type(result)
        if self._wrapper.rpc_rank == self._output_rank:
            return result
        return StepResult(
            result.step,
            finished_transfers=result.finished_transfers,
            mask_checksums=result.mask_checksums,
            routed_experts=result.routed_experts if self._wrapper.rpc_rank % self._num_shards == 0 else (),
        )


def output_rank(layout: RankLayout) -> int:
    """The rank that returns the ids: the first tensor rank of the last pipeline stage, in a layout of one replica."""
    return (layout.pipeline_parallel_size - 1) * layout.tensor_parallel_size


def _receive(connection: socket.socket, tasks: "SimpleQueue[Frame]") -> None:
    """Read tasks in a separate thread, so that the driver never waits for a worker that computes, and such a worker
    notices that the driver is gone.
    """
    parser = FrameParser(FrameKind)
    while piece := receive_piece(connection, wait=True):
        for frame in parser.feed(piece):
            tasks.put(frame)
    os._exit(DRIVER_GONE_EXIT_CODE)


def _configure_logging(rank: int, driver_level: int) -> None:
    """The driver's log level on rank 0, warnings and above on others. The driver prefixes the lines with the rank."""
    configure_logging(rank, world_size=1)
    logging.getLogger(LOGGER_NAME).setLevel(driver_level if rank == 0 else max(driver_level, logging.WARNING))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PeerGoneError:
        sys.exit(DRIVER_GONE_EXIT_CODE)
