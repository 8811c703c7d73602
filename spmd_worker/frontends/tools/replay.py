"""Replay a step log in one process, look into it, or compare two.

    python -m spmd_worker.tools.replay RUN_DIR
        replays scheduler and cache, without weights
    python -m spmd_worker.tools.replay RUN_DIR --until STEP
        and prints the state after STEP
    python -m spmd_worker.tools.replay RUN_DIR --row KEY
        and prints one request's history: KEY is its number, its custom_id, or index:N for row N of the input
    python -m spmd_worker.tools.replay RUN_DIR --with-model
        and recomputes every token on one rank
    python -m spmd_worker.tools.replay --diff A B
        names the first difference of two (each a RUN_DIR or a log)

RUN_DIR is job.run_dir, or <job.output>.run where the job named none, of a job with job.step_log=true; a step log by
itself, such as runs/demo/steps.log or records.rank0.log, may be given too. Exits with 0 when the replay is equal to the
run (or the two logs are equal), with 1 when it is not, with 2 when that is unknown.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from kv_cache.block_ops import BlockOps
from spmd_worker.base.errors import ReplayDivergedError, ReplayError, StepLogError
from spmd_worker.base.files import OwnFileError, own_file_fault
from spmd_worker.base.version import code_fingerprint
from spmd_worker.frontends.replay.history import RowHistory, shorten
from spmd_worker.frontends.replay.replay import (
    HEADER_KEYS_THAT_MAY_DIFFER,
    Replay,
    ReplayedStep,
    find_request,
    first_log_difference,
    header_differences,
    read_messages,
)
from spmd_worker.frontends.replay.step_log import STEP_LOG_NAME, StepLog, StepLogHeader, read_step_log
from spmd_worker.frontends.tools.program import make_parser, print_error
from spmd_worker.frontends.tools.run_dir import NO_JOB, WHERE, RunDirError, RunState, look_at_run
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    Close,
    CommitWeights,
    EndRound,
    EndWorkerEvent,
    Event,
    FinishTransfers,
    Interrupt,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus
from spmd_worker.tokenizer.tokenizer import Tokenizer

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_CANNOT_TELL = 0, 1, 2
MAX_WAITING_SHOWN = 12
MAX_MISMATCHES_SHOWN = 10


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.diff is not None:
            return print_difference(*options.diff)
        return replay_log(options)
    except ReplayDivergedError as error:
        print(f"replay and run part: {error}")
        return EXIT_DIFFERENT
    except (RunDirError, ReplayError, StepLogError, OSError, ValueError) as error:
        print_error("replay", error)
        return EXIT_CANNOT_TELL


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("replay", __doc__)
    parser.add_argument(
        "log", type=Path, nargs="?", metavar="RUN_DIR", help="a run's directory, such as runs/demo, or a step log"
    )
    parser.add_argument("--until", type=int, metavar="STEP", help="print the state after this step and stop there")
    parser.add_argument("--row", metavar="KEY", help="print the history of one request")
    parser.add_argument("--with-model", action="store_true", help="recompute every token on one rank")
    parser.add_argument("--model", type=Path, metavar="PATH", help="where the model is now, if it has moved")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="compare two logs")
    options = parser.parse_args(arguments)
    if (options.log is None) == (options.diff is None):
        parser.error("give one RUN_DIR, or --diff A B")
    if options.with_model and (options.until is not None or options.row is not None):
        parser.error("--with-model recomputes the whole log: leave out --until and --row")
    return options


def replay_log(options: argparse.Namespace) -> int:
    log = open_log(options.log)
    print_run(log)
    model_path = options.model or Path(log.header.model_path)
    replay = Replay(log.header, open_tokenizer(log.header, model_path))
    steps = replay.steps(log.messages())
    if options.with_model:
        return recompute_tokens(log.header, model_path, replay, steps)
    if options.row is not None:
        steps = with_history(log, options.row, replay, steps)
    for step in steps:
        if step.plan.step == options.until:
            print_state(replay.scheduler, step)
            break
    else:
        if options.until is not None:
            raise ReplayError(f"--until {options.until}: the log has steps 1 to {replay.num_steps}")
    print_result(replay, is_whole=options.until is None)
    return EXIT_EQUAL


def open_log(path: Path) -> StepLog:
    """Open a step log, or a run directory's. Raises StepLogError or ReplayError; a torn tail is a warning."""
    if path.is_dir():
        path = log_of_run(path)
    try:
        log = read_step_log(path)
    except OSError as error:
        if not path.exists():
            raise RunDirError(f"{path}: no such folder ({WHERE}), nor a step log: {error.strerror}") from None
        raise ReplayError(f"cannot read {path}: {error.strerror or error}") from None
    if log.torn_tail is not None:
        print(f"warning: {path}: {log.torn_tail}; what comes before is used")
    return log


def log_of_run(run_dir: Path) -> Path:
    path = run_dir / STEP_LOG_NAME
    if path.exists() or path.is_symlink():
        fault = own_file_fault(path)
        if fault is not None:
            raise OwnFileError(path, fault)
        return path
    why = NO_JOB if look_at_run(run_dir).state is RunState.UNKNOWN else "the job was started without job.step_log=true"
    raise RunDirError(f"{run_dir} has no {STEP_LOG_NAME}: {why}")


def open_tokenizer(header: StepLogHeader, model_path: Path) -> Tokenizer | None:
    tokenizer = Tokenizer.open_if_present(model_path)
    if tokenizer is not None and header.tokenizer is not None and tokenizer.fingerprint() != header.tokenizer:
        print(f"warning: the tokenizer of {model_path} is not the run's: stop strings may be found elsewhere")
    return tokenizer


def print_run(log: StepLog) -> None:
    header = log.header
    ranks = [
        f"{size} {name}"
        for name, size in (
            ("tensor", header.tensor_parallel_size),
            ("pipeline", header.pipeline_parallel_size),
            ("data", header.data_parallel_size),
        )
        if size > 1
    ]
    print(f"{log.path}: {log.num_messages} steps of {header.model_path}")
    print(f"  {header.device} {header.dtype}, ranks: {' x '.join(ranks) or 'one'}, seed {header.seed}")
    chunks = "in chunks" if header.enable_chunked_prefill else "in one piece"
    print(
        f"  {header.num_blocks} blocks of {header.block_size} tokens; at most {header.max_num_seqs} sequences and "
        f"{header.max_num_batched_tokens} tokens a step, prompts {chunks}, {header.max_model_len} tokens a sequence"
        f"{', steps decided ahead of ids' if header.num_steps_ahead else ''}"
    )
    print(
        f"  prefix caching {'on' if header.enable_prefix_caching else 'off'}, preemption by {header.preemption_mode}, "
        f"{header.num_host_blocks} host blocks to swap to, {header.num_tier_blocks} in the host tier"
    )
    if header.code != code_fingerprint():
        print("  the code has changed since the run: where replay and run part, the change may be the reason")


def print_result(replay: Replay, *, is_whole: bool) -> None:
    counters = replay.scheduler.counters
    print(
        f"{replay.num_requests} requests, {counters.num_output_tokens} output tokens, {counters.num_preemptions} "
        f"preemptions ({counters.num_swapped_out} by swap), by which {counters.num_recomputed_tokens} computed tokens "
        f"were lost; {counters.num_cached_prompt_tokens} prompt tokens found in the cache"
    )
    if is_whole and not replay.is_closed:
        print("the log does not end with the run's end: it was cut short, or the run was")
    print(f"replayed {replay.num_steps} steps, {what_was_equal(replay)}")


def what_was_equal(replay: Replay) -> str:
    if replay.num_equal_digests == replay.num_steps:
        return "digests equal"
    return f"plans equal (the run wrote {replay.num_equal_digests} digests)"


# The state after a step.


def print_state(scheduler: Scheduler, step: ReplayedStep) -> None:
    cache = scheduler.cache
    print(f"\nafter step {step.plan.step}: {step.plan.num_tokens} tokens computed for {num_rows(step)} sequences")
    if step.sampled is None:
        print("  its sampled ids are not in the log, which ends here: this is the state before they are taken in")
    print_moves(step.plan.block_ops)
    for event in step.events:
        print(f"  then {event_in_words(event)}")
    print(f"  blocks: {cache.num_free_blocks} of {cache.num_blocks} free, {cache.num_cached_blocks} of them cached")
    if cache.num_host_blocks:
        print(f"  host blocks: {cache.num_used_host_blocks} of {cache.num_host_blocks} hold swapped sequences")
    print_waiting("waiting", scheduler.waiting, len(scheduler.waiting))
    for number, sequences in scheduler.queues.loading.items():
        print_waiting(f"waiting for transfer {number}", sequences, len(sequences))
    print(f"  running: {len(scheduler.running)}")
    heads = ("request", "sample", "prompt", "output", "computed", "num_blocks", "blocks")
    print_table([running_line(sequence) for sequence in scheduler.running], heads)
    print()


def print_moves(operations: BlockOps) -> None:
    """Print the blocks copied before the step computed, as from>to."""
    for name, pairs in (
        ("swapped out, device>host", operations.swap_out),
        ("copied on the device", operations.copy),
        ("swapped in, host>device", operations.swap_in),
        (f"transfer {operations.transfer} stores, device>tier", operations.store),
        (f"transfer {operations.transfer} loads, tier>device", operations.load),
    ):
        if pairs:
            print(f"  {name}: {shorten(f'{source}>{destination}' for source, destination in pairs)}")


def event_in_words(event: Event) -> str:
    if isinstance(event, Admit):
        return f"request {event.request.request_id} is admitted"
    if isinstance(event, Abort):
        return f"request {event.request_id} is to end"
    if isinstance(event, ResetPrefixCache):
        return "the prefix cache is reset"
    if isinstance(event, SetWeightVersion):
        return f"the weights are of version {event.version}"
    if isinstance(event, CommitWeights):
        return f"{event.num_tensors} new weights are committed as version {event.version}"
    if isinstance(event, FinishTransfers):
        return f"transfers {shorten(event.numbers)} have finished on every rank"
    if isinstance(event, WorkerEvent):
        return f"worker event {event.number} ({event.name}) is prepared"
    if isinstance(event, EndWorkerEvent):
        return f"worker event {event.number} is {'undone: ' + event.problem if event.problem else 'committed'}"
    if isinstance(event, EndRound):
        return "the replica has answered what it was given"
    if isinstance(event, Interrupt):
        return f"the call ends, interrupted on rank {event.rank}: {event.error}"
    return "the engine ends" if isinstance(event, Close) else repr(event)


def print_waiting(head: str, sequences: Iterable[Sequence], num_sequences: int) -> None:
    """Print the first of `num_sequences` sequences."""
    print(f"  {head}: {num_sequences}")
    shown = list(islice(sequences, MAX_WAITING_SHOWN))
    print_table([waiting_line(sequence) for sequence in shown], ("request", "sample", "tokens", "computed", "why"))
    if len(shown) < num_sequences:
        print(f"    and {num_sequences - len(shown)} more")


def num_rows(step: ReplayedStep) -> int:
    return len(step.plan.continuing) + sum(len(group.sequences) for group in step.plan.groups)


def waiting_line(sequence: Sequence) -> tuple[object, ...]:
    why = "preempted" if sequence.num_lost_tokens else "new"
    if sequence.status is SequenceStatus.SWAPPED:
        why = f"swapped out to {shorten(sequence.host_table.block_ids)}"
    return (*sequence.key, sequence.num_tokens, sequence.num_computed_tokens, why)


def running_line(sequence: Sequence) -> tuple[object, ...]:
    blocks = sequence.table.block_ids
    num_output_tokens = len(sequence.output_token_ids)
    counts = (sequence.num_prompt_tokens, num_output_tokens, sequence.num_computed_tokens, len(blocks))
    return (*sequence.key, *counts, shorten(blocks))


def print_table(rows: list[tuple[object, ...]], heads: tuple[str, ...]) -> None:
    """Print columns aligned right, the last one left."""
    if not rows:
        return
    texts = [heads, *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads) - 1)]
    for row in texts:
        print("    " + "  ".join([*(text.rjust(width) for text, width in zip(row, widths)), row[-1]]))


# One request's history.


def with_history(log: StepLog, key: str, replay: Replay, steps: Iterator[ReplayedStep]) -> Iterator[ReplayedStep]:
    """The same steps; their effect on the request is printed as they pass. Raises ReplayError for an unknown key."""
    request = find_request(read_messages(log.messages(), log.header.num_in_flight), key, log.header.seed)
    if request is None:
        raise ReplayError(
            f"--row {key}: no such request. Give its custom_id, or index:N for row N of the input if it has none; or "
            f"its number, which counts the rows that ran from 0: a row with a seed of its own is found only by that"
        )
    print()
    history = RowHistory(request, print)
    history.tell_request()
    for step in steps:
        history.tell_step(step, replay.scheduler)
        yield step
    history.tell_rest()
    print()


# Recomputing.


def recompute_tokens(header: StepLogHeader, model_path: Path, replay: Replay, steps: Iterator[ReplayedStep]) -> int:
    # Looking into a log needs no torch; this does.
    from spmd_worker.frontends.replay.model import recompute

    num_token_ids, num_different = 0, 0
    try:
        for step in recompute(header, model_path, steps):
            num_token_ids += step.num_token_ids
            for mismatch in step.mismatches:
                num_different += 1
                if num_different <= MAX_MISMATCHES_SHOWN:
                    values = f"{mismatch.logged} in the log, {mismatch.recomputed} recomputed"
                    print(f"  step {mismatch.step}, {mismatch.place}: {values}")
        print_result(replay, is_whole=True)
    finally:
        if num_different > MAX_MISMATCHES_SHOWN:
            print(f"  and {num_different - MAX_MISMATCHES_SHOWN} more")
        print(f"{num_token_ids - num_different} of {num_token_ids} tokens equal")
    return EXIT_DIFFERENT if num_different else EXIT_EQUAL


# Comparing.


def print_difference(first: Path, other: Path) -> int:
    logs = open_log(first), open_log(other)
    names = (str(first), str(other))
    matters = False
    for key, mine, theirs in header_differences(logs[0].header, logs[1].header):
        may_differ = key in HEADER_KEYS_THAT_MAY_DIFFER
        matters = matters or not may_differ
        remark = " (which should change no step)" if may_differ else ""
        print(f"header: {key} is {mine} in {names[0]}, {theirs} in {names[1]}{remark}")
    difference = first_log_difference(*logs, names)
    if difference is not None:
        print(difference)
        return EXIT_DIFFERENT
    print(f"{logs[0].num_messages} steps, all the same")
    return EXIT_DIFFERENT if matters else EXIT_EQUAL
