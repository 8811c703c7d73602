"""What is planted in ranks to make them diverge: each plant changes one rank (or reads what differs between ranks).

Each rank runs this file with NAME FOLDER OVERRIDE... Each injection says when it strikes. Knows the runtime's
insides, which it breaks; nothing of what the tests expect.
"""

import copy
import dataclasses
import json
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import ranks
from numpy.typing import NDArray

import launch
from kv_cache.block import BlockHash, BlockId
from kv_cache.block_table import BlockTable
from kv_cache.swap_space import SwapSpace
from spmd_worker import llm
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import DIVERGED_EXIT_CODE, RanksDisagreeError, ReplicaDivergedError
from spmd_worker.base.liveness.signals import EndingSignals
from spmd_worker.engine import startup as engine_start
from spmd_worker.engine import step_interval
from spmd_worker.frontends import rank_program
from spmd_worker.ranks.transport import connect, relay_channel, relay_tree, step_channel
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.lockstep.wire import codec
from spmd_worker.replica.scheduler.allocator import Allocator, PreemptionPolicy
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import Admit, Event
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import Sequence, SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.worker.runner.model_runner import ModelRunner

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
STEP = 6
"""Where plants strike that strike during the run."""
LONG_S = 600.0
"""A timeout that only a hang reaches."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a plant may strike: this rank of so many, the job's folder."""

    rank: int
    num_ranks: int
    folder: Path

    @property
    def is_victim(self) -> bool:
        """Whether this is the rank that differs: the last."""
        return self.rank == self.num_ranks - 1

    def strike(self) -> None:
        """Leave a note."""
        (self.folder / f"struck.rank{self.rank}").touch()


PLANTS: dict[str, Callable[[Place, list[str]], int | None]] = {}
"""By name: a function that breaks something and may run a script of its own instead of the job."""


def plant(function: Callable[[Place, list[str]], int | None]) -> Callable[[Place, list[str]], int | None]:
    PLANTS[function.__name__] = function
    return function


def main() -> int:
    """The exit code of the job, with something planted; what it prints goes to files of this rank's own."""
    name, folder, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        with open(folder / f"{stream}.rank{rank}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    return run(name, rank, num_ranks, folder, arguments)


def run(name: str, rank: int, num_ranks: int, folder: Path, arguments: list[str]) -> int:
    """The exit code of the job, with something planted."""
    arguments = [*_job_arguments(num_ranks, folder), *arguments]
    # All rows are taken in between two steps, however long that takes here: steps have the numbers that tests expect.
    step_interval._MAX_BUDGET_S = LONG_S
    # Ranks wait for rank 0's words, and for their launcher's signal, however late these come; and for each other.
    rank_program._PATIENCE_S = rank_program._SIGNALLED_S = LONG_S
    connect._CONNECT_S = connect._HELLO_TIMEOUT_S = LONG_S
    exit_code = PLANTS[name](Place(rank, num_ranks, folder), arguments)
    return launch.main(arguments) if exit_code is None else exit_code


def _job_arguments(num_ranks: int, folder: Path) -> list[str]:
    return [
        f"model.path={MODEL}",
        f"parallel.tensor_parallel_size={num_ranks}",
        "device=cpu",
        "cache.num_blocks=64",
        f"job.input={folder / 'rows.jsonl'}",
        f"job.output={folder / 'out.jsonl'}",
        f"job.run_dir={folder / 'run'}",
        f"executor.timeout_s={LONG_S:g}",
    ]


# Nothing that matters.


@plant
def nothing(place: Place, arguments: list[str]) -> None:
    """A control: the templates differ in PYTHONHASHSEED, and so do the ranks of every job."""


# Found before the first step.


@plant
def seed(place: Place, arguments: list[str]) -> None:
    if place.is_victim:
        arguments.append("seed=1")


@plant
def config_key(place: Place, arguments: list[str]) -> None:
    if place.is_victim:
        arguments.append("scheduler.max_num_batched_tokens=1024")


@plant
def weight_byte(place: Place, arguments: list[str]) -> None:
    """The lowest bit of the mantissa of one weight."""
    if place.is_victim:
        arguments.append(f"model.path={_changed_copy(place.folder, 'model.safetensors', -4)}")


@plant
def draft_weight_byte(place: Place, arguments: list[str]) -> None:
    """The lowest bit of the mantissa of one weight of the draft model, which is a copy of the target."""
    draft = _changed_copy(place.folder, "model.safetensors", -4) if place.is_victim else MODEL
    arguments += ["speculative_config.method=draft_model", f"speculative_config.model={draft}"]
    arguments.append("speculative_config.num_speculative_tokens=2")


@plant
def tokenizer_file(place: Place, arguments: list[str]) -> None:
    """Two tokens of the vocabulary change places."""
    if place.is_victim:
        folder = _copy_of_the_model(place.folder)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = json.loads(text)
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        arguments.append(f"model.path={folder}")


@plant
def model_shape(place: Place, arguments: list[str]) -> None:
    if place.is_victim:
        folder = _copy_of_the_model(place.folder)
        text = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 10001.0'))
        arguments.append(f"model.path={folder}")


@plant
def code(place: Place, arguments: list[str]) -> None:
    if place.is_victim:
        engine_start.code_fingerprint = lambda: "f" * 32


@plant
def package_version(place: Place, arguments: list[str]) -> None:
    if place.is_victim:
        right = engine_start.package_versions()
        engine_start.package_versions = lambda: {**right, "torch": "2.0.1"}


@plant
def configured_blocks(place: Place, arguments: list[str]) -> None:
    if place.is_victim:
        arguments.append("cache.num_blocks=63")


@plant
def block_count(place: Place, arguments: list[str]) -> None:
    """A rank that builds its scheduler for fewer blocks than were agreed on."""
    if place.is_victim:
        right = engine_start.new_scheduler
        engine_start.new_scheduler = lambda limits, sizes, *rest: right(
            limits, sizes._replace(num_blocks=sizes.num_blocks - 1), *rest
        )


# Found before the first step in a script that calls `generate`.


@plant
def prompt(place: Place, arguments: list[str]) -> int:
    prompts = ["copy a b c =", "copy d e =" if place.is_victim else "copy d f ="]
    return _generate(place, arguments, prompts, [SamplingParams(max_tokens=4, ignore_eos=True)] * 2)


@plant
def number_of_prompts(place: Place, arguments: list[str]) -> int:
    prompts = ["copy a b c ="] * (1 if place.is_victim else 2)
    return _generate(place, arguments, prompts, [SamplingParams(max_tokens=4, ignore_eos=True)] * len(prompts))


@plant
def sampling_parameter(place: Place, arguments: list[str]) -> int:
    params = [SamplingParams(max_tokens=4, ignore_eos=True, top_p=0.9 if place.is_victim else 0.95)]
    return _generate(place, arguments, ["copy a b c ="], params)


@plant
def prompt_seed(place: Place, arguments: list[str]) -> int:
    params = [SamplingParams(max_tokens=4, ignore_eos=True, seed=2 if place.is_victim else 1)]
    return _generate(place, arguments, ["copy a b c ="], params)


# Found in the step after it happens.


@plant
def request_taken_in(place: Place, arguments: list[str]) -> None:
    """The replica keeps another temperature than rank 0 sent: as if the request had changed on its way in."""
    if not place.is_victim:
        return
    right = Scheduler.handle

    def handle(self: Scheduler, event: Event) -> object:
        if isinstance(event, Admit) and event.request.request_id == 2:
            place.strike()
            sampling = dataclasses.replace(event.request.sampling, temperature=0.5)
            event = Admit(dataclasses.replace(event.request, sampling=sampling))
        return right(self, event)

    Scheduler.handle = handle


@plant
def order_of_a_set(place: Place, arguments: list[str]) -> None:
    """Every rank serves its sequences in the order of a set of their names."""

    def turn_round(self: Scheduler, step: int) -> None:
        if step == STEP:
            place.strike()
            names = {f"row-{sequence.key}": sequence for sequence in self.running}
            self.queues.running = [names[name] for name in set(names)]

    _plant_before_schedule(turn_round)


@plant
def clock(place: Place, arguments: list[str]) -> None:
    """Every rank serves first whose turn it is by its own clock. Those of neighbours are a tick apart: real ones, of
    which only the time modulo the number of rows counts, would agree now and then.
    """

    def turn_round(self: Scheduler, step: int) -> None:
        if step >= STEP and self.running:
            place.strike()
            first = (step + place.rank) % len(self.running)
            self.queues.running = self.running[first:] + self.running[:first]

    _plant_before_schedule(turn_round)


@plant
def block_choice(place: Place, arguments: list[str]) -> None:
    """Every rank but 0 takes another free block: the same number, another place."""

    def turn_round(self: Scheduler, step: int) -> None:
        if step == STEP:
            place.strike()
            pool = self.cache._pool
            pool.release(pool.take(2))

    if place.rank > 0:
        _plant_before_schedule(turn_round)


def _plant_before_schedule(change: Callable[[Scheduler, int], None]) -> None:
    """`change` is given the scheduler and the number of the step that it is about to plan."""
    right = Scheduler.schedule

    def schedule(self: Scheduler) -> StepPlan:
        change(self, self._step + 1)
        return right(self)

    Scheduler.schedule = schedule


@plant
def forgotten_prefix(place: Place, arguments: list[str]) -> None:
    """The replica finds nothing in its cache."""
    arguments.append("cache.block_size=4")
    if not place.is_victim:
        return
    right = Allocator.find_prefix

    def find_prefix(self: Allocator, sequence: Sequence, group: SequenceGroup) -> list[BlockId]:
        found = right(self, sequence, group)
        if found:
            place.strike()
        return []

    Allocator.find_prefix = find_prefix


@plant
def way_out(place: Place, arguments: list[str]) -> None:
    """The replica thinks its copies slow, and computes again what the others swap."""
    arguments += _TIGHT
    if not place.is_victim:
        return

    def prefers_swap(self: PreemptionPolicy, num_computed_tokens: int, num_blocks: int) -> bool:
        place.strike()
        return False

    PreemptionPolicy.prefers_swap = prefers_swap


@plant
def host_block_choice(place: Place, arguments: list[str]) -> None:
    """The replica swaps to other host blocks: as many, other places."""
    arguments += _TIGHT
    if not place.is_victim:
        return
    right = SwapSpace.store

    def store(self: SwapSpace, num_blocks: int, hashes: list[BlockHash]) -> tuple[BlockTable, list[int]]:
        place.strike()
        self._pool.release(self._pool.take(2))
        return right(self, num_blocks, hashes)

    SwapSpace.store = store


_TIGHT = [
    *("model.max_model_len=48", "cache.num_blocks=12", "cache.block_size=4"),
    *("cache.swap_space_gib=0.01", "scheduler.preemption_mode=swap"),
]
"""Later arguments win: a cache in which the rows do not all find room to the end."""


@plant
def sampled_id(place: Place, arguments: list[str]) -> None:
    if not place.is_victim:
        return
    right = ModelRunner.sample

    def sample(self: ModelRunner) -> object:
        result = right(self)
        if result.step == STEP:
            place.strike()
            ids = result.token_ids
            result = dataclasses.replace(result, token_ids=(*ids[:-1], ids[-1] ^ 1))
        return result

    ModelRunner.sample = sample


@plant
def relays(place: Place, arguments: list[str]) -> None:
    """None: messages take the way that those of many ranks take."""
    relay_tree.MIN_RELAYED_RANKS = 2
    right = relay_channel.TcpLeaf.receive

    def receive(self: relay_channel.TcpLeaf) -> bytes:
        place.strike()
        return right(self)

    relay_channel.TcpLeaf.receive = receive


@plant
def relayed_sampled_id(place: Place, arguments: list[str]) -> None:
    relay_tree.MIN_RELAYED_RANKS = 2
    sampled_id(place, arguments)


@plant
def killed_relay(place: Place, arguments: list[str]) -> None:
    """The last relay of 4 ranks or more, before it passes a message on."""
    relay_tree.MIN_RELAYED_RANKS = 2
    right = step_channel.TcpFollower.receive

    def receive(self: step_channel.TcpFollower) -> bytes:
        payload = right(self)
        if self._num_received == STEP and isinstance(self, relay_channel.TcpRelay):
            place.strike()
            os.kill(os.getpid(), signal.SIGKILL)
        return payload

    step_channel.TcpFollower.receive = receive


@plant
def row_mask(place: Place, arguments: list[str]) -> None:
    """One token more is allowed, of the first rank's shard of the vocabulary: the ids are the same."""
    if not place.is_victim:
        return
    right_forward, right_fill = ModelRunner.forward, RowGrammar.fill
    steps: list[int] = [0]

    def forward(self: ModelRunner, step: int, *given: object, **named: object) -> None:
        steps[0] = step
        right_forward(self, step, *given, **named)

    def fill(self: RowGrammar, bits: NDArray[np.int32]) -> None:
        right_fill(self, bits)
        if steps[0] == STEP:
            place.strike()
            bits[0] ^= 1

    ModelRunner.forward, RowGrammar.fill = forward, fill


@plant
def row_mask_without_checksums(place: Place, arguments: list[str]) -> None:
    row_mask(place, arguments)
    right = ModelRunner.sample
    ModelRunner.sample = lambda self: dataclasses.replace(right(self), mask_checksums=())


# Over gloo.


@plant
def refused_connection(place: Place, arguments: list[str]) -> None:
    connect._CONNECT_S = 0.5
    if place.is_victim:
        connect.socket.create_connection = _refuse


@plant
def refused_connection_and_sampled_id(place: Place, arguments: list[str]) -> None:
    refused_connection(place, arguments)
    sampled_id(place, arguments)


def _refuse(*arguments: object, **options: object) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


# Messages.


@plant
def dropped_message(place: Place, arguments: list[str]) -> None:
    if place.rank == 0:
        _plant_in_messages(place, lambda deliver, payload: None)


@plant
def repeated_message(place: Place, arguments: list[str]) -> None:
    def deliver_twice(deliver: partial[None], payload: bytes) -> None:
        deliver(payload)
        deliver(payload)

    if place.rank == 0:
        _plant_in_messages(place, deliver_twice)


@plant
def flipped_bit(place: Place, arguments: list[str]) -> None:
    """In a sampled id."""
    if place.rank != 0:
        return
    decoder = codec.Decoder()

    def deliver_damaged(deliver: partial[None], payload: bytes) -> None:
        deliver(next(filter(partial(_samples_otherwise, decoder, payload), _flipped(payload))))

    # Every message before the damaged one is read here too, so that the bit can be found.
    _plant_in_messages(place, deliver_damaged, decoder.decode)


@plant
def flipped_bit_of_the_frame(place: Place, arguments: list[str]) -> None:
    """In the frame's number."""
    if place.rank == 0:
        _plant_in_messages(place, lambda deliver, payload: deliver.func(*deliver.args[:2], STEP ^ 1, payload))


# The same, with the check switched off that finds it.


@plant
def dropped_message_unnumbered(place: Place, arguments: list[str]) -> None:
    _trust_any_number()
    dropped_message(place, arguments)


@plant
def repeated_message_unnumbered(place: Place, arguments: list[str]) -> None:
    _trust_any_number()
    repeated_message(place, arguments)


@plant
def flipped_bit_unchecked(place: Place, arguments: list[str]) -> None:
    codec._checked_end = lambda data: len(data) - 4
    flipped_bit(place, arguments)


def _trust_any_number() -> None:
    step_channel.TcpFollower._check_number = lambda self, number: None


def _flipped(payload: bytes) -> Iterator[bytes]:
    """The payload with one bit flipped: the lowest of each byte before the checksum."""
    for place in range(len(payload) - 4):
        yield payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]


def _samples_otherwise(decoder: codec.Decoder, payload: bytes, damaged: bytes) -> bool:
    """Whether damaged bytes would pass for a message with other sampled ids if their checksum were right."""
    right = copy.deepcopy(decoder).decode(payload).sampled_token_ids
    try:
        wrong = copy.deepcopy(decoder).decode(damaged[:-4] + struct.pack("<I", crc32(damaged[:-4]))).sampled_token_ids
    except codec.MessageError:
        return False
    return wrong != right and len(wrong) == len(right) and min(wrong) >= 0 and max(wrong) < 256


def _plant_in_messages(
    place: Place,
    tamper: Callable[[partial[None], bytes], None],
    see: Callable[[bytes], object] = lambda payload: None,
) -> None:
    """Rank 0 hands one message to the last rank to `tamper` instead of sending it; `see` sees those before it."""
    right = step_channel.send_frame

    def send_frame(connection: object, kind: step_channel.FrameKind, number: int, payload: bytes = b"") -> None:
        is_message = kind is step_channel.FrameKind.MESSAGE and connection is channels[0]._connections[-1]
        if is_message and number == STEP:
            place.strike()
            tamper(partial(right, connection, kind, number), payload)
            return
        if is_message and number < STEP:
            see(payload)
        right(connection, kind, number, payload)

    channels: list[step_channel.TcpLeader] = []
    right_start = step_channel.TcpLeader.start

    def start(self: step_channel.TcpLeader) -> None:
        channels.append(self)
        right_start(self)

    step_channel.TcpLeader.start = start
    step_channel.send_frame = send_frame


def _generate(place: Place, arguments: list[str], prompts: list[str], params: list[SamplingParams]) -> int:
    """A script of the kind that people write, which leaves as launch.py does."""
    EndingSignals(lambda: None, lambda number: None, LONG_S).install()
    if "executor.digest_every=0" in arguments:
        right_config = llm.run_config

        def without_digests(given: Mapping[str, Any]) -> RunConfig:
            config = right_config(given)
            return dataclasses.replace(config, executor=dataclasses.replace(config.executor, digest_every=0))

        llm.run_config = without_digests
    with llm.LLM(MODEL, tensor_parallel_size=place.num_ranks, num_blocks=64, device="cpu", timeout_s=LONG_S) as model:
        place.strike()
        try:
            outputs = model.generate(prompts, params, use_tqdm=False)
        except (RanksDisagreeError, ReplicaDivergedError) as error:
            if place.rank == 0:
                print(error, file=sys.stderr)
            return DIVERGED_EXIT_CODE
    with open(place.folder / f"outputs.rank{place.rank}.json", "w", encoding="utf-8") as stream:
        json.dump([output.outputs[0].token_ids for output in outputs], stream)
    return 0


def _copy_of_the_model(folder: Path) -> Path:
    return Path(shutil.copytree(MODEL, folder / "model"))


def _changed_copy(folder: Path, name: str, place: int) -> Path:
    """A copy of the model with the lowest bit of one byte flipped."""
    copy = _copy_of_the_model(folder)
    data = bytearray((copy / name).read_bytes())
    data[place] ^= 1
    (copy / name).write_bytes(data)
    return copy


if __name__ == "__main__":
    code = main()
    # At once, as launch.py leaves: a SIGTERM while the interpreter is taken down would be the end of it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
