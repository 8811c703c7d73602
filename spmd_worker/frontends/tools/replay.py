"""Replay a step log in one process, inspect it, or compare two.

    python -m spmd_worker.tools.replay RUN_DIR
        replays scheduler and cache, without weights
    python -m spmd_worker.tools.replay RUN_DIR --until STEP
        and prints the state after STEP
    python -m spmd_worker.tools.replay RUN_DIR --row KEY
        and prints one request's history: KEY is its number, its custom_id, or index:N for row N without one
    python -m spmd_worker.tools.replay RUN_DIR --with-model
        and recomputes every token on one rank
    python -m spmd_worker.tools.replay --diff A B
        prints the first difference of two (each a RUN_DIR or a log)

RUN_DIR is job.run_dir, by default <job.output>.run, of a job with job.step_log=true, or a step log itself, such as
runs/demo/steps.log or records.rank0.log. Exits with 0 if the replay is equal to the run (or the two logs are equal),
with 1 if it is not, with 2 if that is unknown.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kv_cache.block_ops import BlockOps
from kv_cache.state_ops import StateOps
from spmd_worker.base.errors import ReplayDivergedError, ReplayError, SpmdError
from spmd_worker.base.files import JobFileError, job_file_fault
from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME
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
from spmd_worker.frontends.tools.pools import without_job
from spmd_worker.frontends.tools.program import ends_without_its_reader, make_parser, print_error
from spmd_worker.frontends.tools.run_dir import NO_STEP, WHERE, RunDirError, RunState, look_at_run
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import (
    Abort,
    AddAdapter,
    AddPromptAdapter,
    Admit,
    Close,
    CommitWeights,
    EndRound,
    EndWorkerEvent,
    Event,
    FinishTransfers,
    FoundBlocks,
    Interrupt,
    PinAdapter,
    PinPromptAdapter,
    RemoveAdapter,
    RemovePromptAdapter,
    ResetMediaRows,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.hit_comparison import HitComparison
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus
from spmd_worker.tokenizer.tokenizer import Tokenizer

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_CANNOT_TELL = 0, 1, 2
MAX_WAITING_SHOWN = 12
MAX_MISMATCHES_SHOWN = 10


@ends_without_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("replay", __doc__)
    parser.add_argument(
        "log", type=Path, nargs="?", metavar="RUN_DIR", help="a run's directory, such as runs/demo, or a step log"
    )
    parser.add_argument("--until", type=int, metavar="STEP", help="print the state after this step and stop there")
    parser.add_argument("--row", metavar="KEY", help="print the history of one request")
    parser.add_argument("--with-model", action="store_true", help="recompute every token on one rank")
    parser.add_argument("--model", type=Path, metavar="PATH", help="the model's folder, if it has moved")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="compare two logs")
    options = parser.parse_args(arguments)
    if (options.log is None) == (options.diff is None):
        parser.error("give one RUN_DIR, or --diff A B")
    if options.with_model and (options.until is not None or options.row is not None):
        parser.error("--with-model recomputes the complete log: leave out --until and --row")
    try:
        return print_difference(*options.diff) if options.diff is not None else replay_log(options)
    except ReplayDivergedError as error:
        print(f"replay and run differ: {error}")
        return EXIT_DIFFERENT
    except (RunDirError, SpmdError, OSError, ValueError) as error:
        print_error("replay", error)
        return EXIT_CANNOT_TELL


def replay_log(options: argparse.Namespace) -> int:
    log = open_log(options.log)
    print_run(log)
    model_path = options.model or Path(log.header.model_path)
    if (options.with_model or options.model is not None) and not model_path.is_dir():
        key = "model.path" if options.model is None else "--model"
        raise ReplayError(f"{key}={model_path} is not a folder here: give --model the one that has the run's model now")
    tokenizer = Tokenizer.open_if_present(model_path)
    if tokenizer is not None and log.header.tokenizer not in (None, tokenizer.fingerprint()):
        print(f"warning: the tokenizer of {model_path} is not the run's: stop strings may be found elsewhere")
    replay = Replay(log.header, tokenizer)
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
    print_result(replay, is_complete=options.until is None)
    return EXIT_EQUAL


def open_log(path: Path) -> StepLog:
    """Open a step log, or a run directory's. Raises StepLogError or ReplayError; a torn tail is a warning."""
    if path.is_dir():
        run_dir, path = path, path / STEP_LOG_NAME
        fault = job_file_fault(path)
        if fault is not None:
            raise JobFileError(path, fault)
        if not path.exists():
            has_job = look_at_run(run_dir).state is not RunState.UNKNOWN
            has_steps = (run_dir / STEP_STATS_NAME).exists()
            without = "the job was started without job.step_log=true" if has_steps else NO_STEP
            reason = without if has_job else without_job(run_dir)
            raise RunDirError(f"{run_dir} has no {STEP_LOG_NAME}: {reason}")
    try:
        log = read_step_log(path)
    except OSError as error:
        if not path.exists():
            raise RunDirError(f"{path}: no such folder ({WHERE}), nor a step log: {error.strerror}") from None
        raise ReplayError(f"cannot read {path}: {error.strerror or error}") from None
    if log.torn_tail is not None:
        print(f"warning: {path}: {log.torn_tail}; the messages before are used")
    return log


def print_run(log: StepLog) -> None:
    header = log.header
    sizes = {name: getattr(header, f"{name}_parallel_size") for name in ("tensor", "pipeline", "data")}
    ranks = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    print(f"{log.path}: {log.num_messages} steps of {header.model_path}")
    print(f"  {header.device} {header.dtype}, ranks: {ranks or 'one'}, seed {header.seed}")
    chunks = "chunked" if header.enable_chunked_prefill else "not chunked"
    print(
        f"  {header.num_blocks} blocks of {header.block_size} tokens; at most {header.max_num_seqs} sequences and "
        f"{header.max_num_batched_tokens} tokens a step, prompts {chunks}, {header.max_model_len} tokens a sequence"
        f"{', steps planned ahead of ids' if header.num_steps_ahead else ''}"
    )
    print(
        f"  prefix caching {'on' if header.enable_prefix_caching else 'off'}, preemption by {header.preemption_mode}, "
        f"{header.num_host_blocks} host blocks for swapping, {header.num_tier_blocks} in the host tier"
        f"{', a connector to blocks outside' if header.connector_saves is not None else ''}"
    )
    if header.code != code_fingerprint():
        print("  the code has changed since the run: this may explain a difference of replay and run")


def print_result(replay: Replay, *, is_complete: bool) -> None:
    counters = replay.scheduler.counters
    print(
        f"{replay.num_requests} requests, {counters.num_output_tokens} output tokens, {counters.num_preemptions} "
        f"preemptions ({counters.num_swapped_out} by swap) that lost {counters.num_recomputed_tokens} computed tokens; "
        f"{counters.num_cached_prompt_tokens} prompt tokens found in the cache"
    )
    if is_complete and not replay.is_closed:
        print("the log does not end with the run's end: the log was truncated, or the run was killed")
    has_all = replay.num_equal_digests == replay.num_steps
    equal = "digests equal" if has_all else f"plans equal (the run wrote {replay.num_equal_digests} digests)"
    print(f"replayed {replay.num_steps} steps, {equal}")


# The state after a step.


def print_state(scheduler: Scheduler, step: ReplayedStep) -> None:
    plan, cache = step.plan, scheduler.cache
    num_sequences = len(plan.continuing) + sum(len(group.sequences) for group in plan.groups)
    print(f"\nafter step {plan.step}: {plan.num_tokens} tokens computed for {num_sequences} sequences")
    if step.sampled is None:
        print("  its sampled ids are not in the log, which ends here: this is the state before they are applied")
    print_block_ops(plan.block_ops)
    print_state_ops(plan.state_ops)
    print_comparisons(plan.hit_comparisons)
    for row in plan.repeated_rows:
        print(f"  request {plan.continuing[row].request_id} computed again by itself, and compared")
    for event in step.events:
        print(f"  then {EVENT_TEXTS.get(type(event), repr)(event)}")
    print(f"  blocks: {cache.num_free_blocks} of {cache.num_blocks} free, {cache.num_cached_blocks} of them cached")
    if cache.num_host_blocks:
        print(f"  host blocks: {cache.num_used_host_blocks} of {cache.num_host_blocks} hold swapped sequences")
    if scheduler.state_slots is not None:
        slots = scheduler.state_slots
        print(f"  state slots: {slots.num_used_slots} of {slots.num_slots} in use, {slots.num_snapshots} snapshots")
    print_waiting("waiting", scheduler.waiting, len(scheduler.waiting))
    for number, sequences in scheduler.queues.loading.items():
        print_waiting(f"waiting for transfer {number}", sequences, len(sequences))
    if scheduler.queues.held:
        print_waiting("waiting for the end of the pause", scheduler.queues.held, len(scheduler.queues.held))
    print(f"  running: {len(scheduler.running)}")
    heads = ("request", "sample", "prompt", "output", "computed", "num_blocks", "blocks")
    rows: list[tuple[object, ...]] = []
    for sequence in scheduler.running:
        blocks = sequence.table.block_ids
        counts = (sequence.num_prompt_tokens, len(sequence.output_token_ids), sequence.num_computed_tokens, len(blocks))
        rows.append((*sequence.key, *counts, shorten(blocks)))
    print_table(rows, heads)
    print()


def print_block_ops(operations: BlockOps) -> None:
    """Print the blocks copied before the step computed, as from>to."""
    for name, pairs in (
        ("swapped out, device>host", operations.swap_out),
        ("copied on the device", operations.copy),
        ("swapped in, host>device", operations.swap_in),
        (f"transfer {operations.transfer} stores, device>tier", operations.store),
        (f"transfer {operations.transfer} loads, tier>device", operations.load),
        (f"transfer {operations.transfer} saves, device>name", [(b, name.hex()) for b, name in operations.save]),
        (f"transfer {operations.transfer} loads, name>device", [(name.hex(), b) for name, b in operations.fetch]),
    ):
        if pairs:
            print(f"  {name}: {shorten(f'{source}>{destination}' for source, destination in pairs)}")


def print_state_ops(operations: StateOps) -> None:
    """Print the recurrent states copied before the step computed, as from>to."""
    for name, pairs in (
        ("states swapped out, device>host", operations.swap_out),
        ("states copied on the device", operations.copy),
        ("states swapped in, host>device", operations.swap_in),
    ):
        if pairs:
            print(f"  {name}: {shorten(f'{source}>{destination}' for source, destination in pairs)}")


def print_comparisons(comparisons: Iterable[HitComparison]) -> None:
    """Print the hits that the step computed again, block by block, and whether a state was compared."""
    for each in comparisons:
        blocks = shorten(f"{copy.block_index}={copy.number}" for copy in each.blocks)
        states = "".join([f", the state after block {copy.block_index} in slot {copy.number}" for copy in each.states])
        print(f"  request {each.key.request_id} compared with the cache, index=block: {blocks}{states}")


EVENT_TEXTS: dict[type[Event], Callable[[Any], str]] = {
    Admit: lambda event: f"request {event.request.request_id} is admitted",
    Abort: lambda event: f"request {event.request_id} is aborted",
    ResetPrefixCache: lambda event: "the prefix cache is reset",
    ResetMediaRows: lambda event: "the rows of all images and recordings are dropped",
    SetWeightVersion: lambda event: f"the weights are of version {event.version}",
    CommitWeights: lambda event: f"{event.num_tensors} new weights are committed as version {event.version}",
    FinishTransfers: lambda event: (
        f"transfers {shorten(event.numbers)} have finished on every rank"
        f"{' (those below 0 have failed on some)' if min(event.numbers, default=0) < 0 else ''}"
    ),
    FoundBlocks: lambda event: (
        f"{len(event.hashes)} blocks were found outside the engine"
        f"{f', {len(event.missing)} are there no more' if event.missing else ''}"
    ),
    WorkerEvent: lambda event: f"worker event {event.number} ({event.name}) is prepared",
    EndWorkerEvent: lambda event: (
        f"worker event {event.number} is {'undone: ' + event.problem if event.problem else 'committed'}"
    ),
    AddAdapter: lambda event: (
        f"LoRA adapter {event.int_id} ({event.name!r}) is loaded"
        f"{', evicted are ' + shorten(event.evicted) if event.evicted else ''}"
    ),
    RemoveAdapter: lambda event: f"LoRA adapter {event.int_id} is removed",
    PinAdapter: lambda event: f"LoRA adapter {event.int_id} is pinned",
    AddPromptAdapter: lambda event: f"prompt adapter {event.int_id} ({event.name!r}) is loaded from {event.path}",
    RemovePromptAdapter: lambda event: f"prompt adapter {event.int_id} is removed",
    PinPromptAdapter: lambda event: f"prompt adapter {event.int_id} is pinned",
    EndRound: lambda event: "the replica has answered all its requests",
    Interrupt: lambda event: f"the call ends, interrupted on rank {event.rank}: {event.error}",
    Close: lambda event: "the engine ends",
}


def print_waiting(head: str, sequences: Iterable[Sequence], num_sequences: int) -> None:
    """Print the first of `num_sequences` sequences."""
    print(f"  {head}: {num_sequences}")
    shown = list(islice(sequences, MAX_WAITING_SHOWN))
    print_table([waiting_line(sequence) for sequence in shown], ("request", "sample", "tokens", "computed", "reason"))
    if len(shown) < num_sequences:
        print(f"    and {num_sequences - len(shown)} more")


def waiting_line(sequence: Sequence) -> tuple[object, ...]:
    reason = "preempted" if sequence.num_lost_tokens else "new"
    if sequence.status is SequenceStatus.SWAPPED:
        reason = f"swapped out to {shorten(sequence.host_table.block_ids)}"
    return (*sequence.key, sequence.num_tokens, sequence.num_computed_tokens, reason)


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
            f"--row {key}: no such request. Give its custom_id, or index:N for row N of the input without one, or its "
            f"number among the rows that ran, from 0: a row with its own seed is found only by its number"
        )
    print()
    history = RowHistory(request, print)
    history.write_request()
    for step in steps:
        history.write_step(step, replay.scheduler)
        yield step
    history.flush()
    print()


# Recomputing.


def recompute_tokens(header: StepLogHeader, model_path: Path, replay: Replay, steps: Iterator[ReplayedStep]) -> int:
    # Imported here because it brings torch, which inspecting a log does without.
    from spmd_worker.frontends.replay.model import recompute

    num_token_ids, num_different = 0, 0
    try:
        for step in recompute(header, model_path, steps):
            num_token_ids += step.num_token_ids
            for mismatch in step.mismatches:
                num_different += 1
                if num_different <= MAX_MISMATCHES_SHOWN:
                    values = f"{mismatch.logged} in the log, {mismatch.recomputed} recomputed"
                    print(f"  step {mismatch.step}, {mismatch.position}: {values}")
        print_result(replay, is_complete=True)
    finally:
        if num_different > MAX_MISMATCHES_SHOWN:
            print(f"  and {num_different - MAX_MISMATCHES_SHOWN} more")
        print(f"{num_token_ids - num_different} of {num_token_ids} tokens equal")
    return EXIT_DIFFERENT if num_different else EXIT_EQUAL


# Comparing.


def print_difference(first: Path, other: Path) -> int:
    logs = open_log(first), open_log(other)
    names = (str(first), str(other))
    is_different = False
    for key, mine, theirs in header_differences(logs[0].header, logs[1].header):
        may_differ = key in HEADER_KEYS_THAT_MAY_DIFFER
        is_different = is_different or not may_differ
        remark = " (which should change no step)" if may_differ else ""
        print(f"header: {key} is {mine} in {names[0]}, {theirs} in {names[1]}{remark}")
    difference = first_log_difference(*logs, names)
    if difference is not None:
        print(difference)
        return EXIT_DIFFERENT
    print(f"{logs[0].num_messages} steps, all equal")
    return EXIT_DIFFERENT if is_different else EXIT_EQUAL
