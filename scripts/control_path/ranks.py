"""The control path of a thousand ranks on one machine: rank 0 for real, other ranks as sockets, the network a model."""

import argparse
import gc
import json
import os
import select
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from control_path.replica_load import PARTS, LoadedReplica

from spmd_worker.ranks.transport.frames import FrameKind, FrameParser, send_frame
from spmd_worker.ranks.transport.relay_channel import TreeLeader
from spmd_worker.ranks.transport.relay_tree import RelayTree, pack_answers, tree_of
from spmd_worker.ranks.transport.step_channel import TcpLeader

NUM_CROWDS = 2
NUM_WARM_STEPS = 10
TIMEOUT_S = 120.0
DIGEST = bytes(range(16))
TARGETS_US = {256: 2000.0, 4096: 10_000.0}


@dataclass(frozen=True, slots=True)
class Exchange:
    """CPU microseconds of rank 0 in a step, medians, and the wall time of a round on this machine."""

    ranks: int
    group: int
    sockets: int
    num_bytes: int
    collect_us: float
    send_us: float
    wall_p50_us: float
    wall_p99_us: float

    @property
    def cpu_us(self) -> float:
        return self.collect_us + self.send_us


@dataclass(frozen=True, slots=True)
class Network:
    """Latency of one hop, and bandwidth of one rank's link."""

    latency_us: float
    gigabits: float

    def send_us(self, num_bytes: int, num_copies: int) -> float:
        return num_bytes * 8 * num_copies / (self.gigabits * 1e3)


def measure_replica(num_sequences: int, options: argparse.Namespace) -> dict[str, float]:
    """Microseconds of CPU time of each part, medians; of the whole step p50 and p99; bytes of the message."""
    replica = LoadedReplica(num_sequences, options.prompt_tokens, options.output_tokens)
    replica.start()
    # As in our programs: collections look at new objects only.
    gc.collect()
    gc.freeze()
    for _ in range(NUM_WARM_STEPS):
        replica.step()
    replica.forget_times()
    for _ in range(options.steps):
        replica.step()
    gc.unfreeze()
    steps = [sum(each) for each in zip(*replica.times_us.values(), strict=True)]
    hundredths = statistics.quantiles(steps, n=100)
    medians = {part: statistics.median(replica.times_us[part]) for part in PARTS}
    return {
        "sequences": num_sequences,
        "joined": statistics.mean(replica.num_joined),
        "bytes": statistics.median_low(replica.num_bytes),
        "bytes_max": max(replica.num_bytes),
        **medians,
        "p50": hundredths[49],
        "p99": hundredths[98],
    }


def measure_exchange(tree: RelayTree, num_bytes: int, num_steps: int) -> Exchange:
    """Rank 0's side of a step's exchange over real sockets, to the ranks that it is connected with in `tree`. Other
    processes answer for these, a relay for its whole group.
    """
    children = tree.children(0)
    bundle_sizes = [1 + len(tree.children(rank)) for rank in children]
    with _crowds(bundle_sizes, num_bytes) as connections:
        # In place of idle connections: those of children serve.
        leader: TcpLeader = TcpLeader(connections, TIMEOUT_S)
        if tree.has_relays:
            idle = iter(connections)
            by_rank = {rank: next(idle) for rank in children}
            spare = [socket.socketpair() for _ in range(tree.size - 1 - len(children))]
            rest = iter(spare)
            every = [by_rank[rank] if rank in by_rank else next(rest)[0] for rank in range(1, tree.size)]
            leader = TreeLeader(every, TIMEOUT_S, tree)
        leader.start()
        payload, walls = bytes(num_bytes), list[float]()
        collects, sends = list[float](), list[float]()
        for step in range(NUM_WARM_STEPS + num_steps):
            started_s, cpu_s = time.perf_counter(), time.thread_time()
            answers = leader.collect(step)
            collected_s = time.thread_time()
            assert answers.count(DIGEST) == tree.size - 1
            leader.send(payload)
            sends.append((time.thread_time() - collected_s) * 1e6)
            collects.append((collected_s - cpu_s) * 1e6)
            walls.append((time.perf_counter() - started_s) * 1e6)
        leader.close()
        for ours, theirs in spare if tree.has_relays else ():
            ours.close()
            theirs.close()
    collect_us, send_us = (statistics.median(each[NUM_WARM_STEPS:]) for each in (collects, sends))
    wall = statistics.quantiles(walls[NUM_WARM_STEPS:], n=100)
    return Exchange(
        tree.size,
        tree.group_size,
        len(children),
        num_bytes,
        collect_us,
        send_us,
        wall_p50_us=wall[49],
        wall_p99_us=wall[98],
    )


@contextmanager
def _crowds(bundle_sizes: Sequence[int], num_bytes: int) -> Iterator[list[socket.socket]]:
    """Connections to processes that answer as followers do, one for each size, until they are closed."""
    fork = get_context("fork")
    with socket.create_server(("127.0.0.1", 0), backlog=len(bundle_sizes)) as listener:
        address = listener.getsockname()
        numbered = list(enumerate(bundle_sizes))
        crowds = [fork.Process(target=_crowd, args=(address, numbered[at::NUM_CROWDS])) for at in range(NUM_CROWDS)]
        for crowd in crowds:
            crowd.start()
        accepted: dict[int, socket.socket] = {}
        while len(accepted) < len(bundle_sizes):
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
    yield [accepted[number] for number in range(len(bundle_sizes))]
    for connection in accepted.values():
        connection.close()
    for crowd in crowds:
        crowd.join()


def _crowd(address: tuple[str, int], numbered: Sequence[tuple[int, int]]) -> None:
    """Answer each message with the next step's answer, of a rank or of a relay with its group."""
    poll = select.epoll()
    ends: dict[int, tuple[socket.socket, FrameParser, bytes]] = {}
    for number, size in numbered:
        connection = socket.create_connection(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(number.to_bytes(4, "little"))
        answer = DIGEST if size == 1 else pack_answers([DIGEST] * size)
        ends[connection.fileno()] = (connection, FrameParser(FrameKind), answer)
        poll.register(connection, select.EPOLLIN)
        send_frame(connection, FrameKind.ANSWER, 0, answer)
    while ends:
        for descriptor, _ in poll.poll():
            connection, parser, answer = ends[descriptor]
            try:
                piece = connection.recv(1 << 20)
            except ConnectionResetError:
                # Rank 0 left while an answer was on its way.
                piece = b""
            if not piece:
                poll.unregister(descriptor)
                del ends[descriptor]
                connection.close()
                continue
            for frame in parser.feed(piece):
                if frame.kind is FrameKind.MESSAGE:
                    send_frame(connection, FrameKind.ANSWER, frame.number + 1, answer)


def modelled_us(hops: Sequence[int], cost_us: float, num_bytes: int, network: Network) -> float:
    """Answers up and message down through ranks with so many ends each: CPU time of each on the way, then the wire."""
    return sum(num * cost_us + network.send_us(num_bytes, num) + 2 * network.latency_us for num in hops)


def tree_hops(num_ranks: int, fanout: int) -> list[int]:
    """Ends of each rank on the longest way through a complete tree."""
    hops, num_reached, num_level = [], 1, 1
    while num_reached < num_ranks:
        hops.append(min(fanout, -(-(num_ranks - num_reached) // num_level)))
        num_level *= fanout
        num_reached += num_level
    return hops


def bench_ranks(options: argparse.Namespace) -> int:
    """Cost of a step's control path with a thousand ranks and thousands of sequences.

    Rank 0's replica is real, without a model: scheduler, digest, codec, mirror, and a follower's decoder, under a load
    of rows of which some end and others join in each step. Times are of CPU, in microseconds, because other programs
    share the machine. Then rank 0's exchange over real sockets: with a socket for each rank (a star), and with relays
    (`ranks/transport/relay_tree.py`), where two processes answer for the other ranks. Last, by a model of the network
    from the measured cost of an end: a star, the relays, and trees of other fan-outs.

        schedule digest encode   before the exchange, on rank 0 (the first two on every rank)
        decode mirror            after it, on a follower
        apply events             once the step's ids are known
        p50 p99                  all of these together, step by step
    """
    print(
        f"{'sequences':>9} {'joined':>6} {'bytes':>7} {'max':>7}"
        + "".join(f" {part:>8}" for part in (*PARTS, "p50", "p99"))
    )
    replicas = [measure_replica(num_sequences, options) for num_sequences in options.sequences]
    for row in replicas:
        counts = f"{row['sequences']:>9} {row['joined']:>6.1f} {row['bytes']:>7} {row['bytes_max']:>7}"
        print(counts + "".join(f" {row[part]:>8.0f}" for part in (*PARTS, "p50", "p99")))
    print(
        f"\n{'ranks':>6} {'group':>6} {'sockets':>7} {'bytes':>7} {'collect':>8} {'send':>8} {'wall p50':>9} "
        f"{'wall p99':>9}"
    )
    exchanges = []
    for num_bytes in [int(row["bytes"]) for row in replicas]:
        for tree in _shapes(options.ranks):
            exchange = measure_exchange(tree, num_bytes, options.rounds)
            exchanges.append(exchange)
            print(
                f"{exchange.ranks:>6} {exchange.group:>6} {exchange.sockets:>7} {num_bytes:>7} "
                f"{exchange.collect_us:>8.0f} {exchange.send_us:>8.0f} {exchange.wall_p50_us:>9.0f} "
                f"{exchange.wall_p99_us:>9.0f}"
            )
    models = [row for each in zip(replicas, _by_bytes(exchanges), strict=True) for row in _models(*each, options)]
    print(f"\n{'sequences':>9} {'ranks':>6} {'way':>10} {'exchange':>9} {'step':>8}")
    for model in models:
        print(
            f"{model['sequences']:>9} {model['ranks']:>6} {model['way']:>10} {model['exchange_us']:>9.0f} "
            f"{model['step_us']:>8.0f}"
        )
    print(json.dumps(_summary(replicas, exchanges, models)))
    return 0


def _shapes(num_ranks: int) -> list[RelayTree]:
    """The star, the relays, and a star as large as a relay's group."""
    tree = tree_of(num_ranks, 2)
    return [RelayTree(num_ranks, num_ranks), tree, RelayTree(tree.group_size, tree.group_size)]


def _by_bytes(exchanges: list[Exchange]) -> list[list[Exchange]]:
    return [exchanges[start : start + 3] for start in range(0, len(exchanges), 3)]


def _models(
    replica: dict[str, float], exchanges: list[Exchange], options: argparse.Namespace
) -> list[dict[str, float | str]]:
    star, tree, group = exchanges
    network = Network(options.latency_us, options.gigabits)
    num_bytes, cost_us = int(replica["bytes"]), tree.cpu_us / tree.sockets
    wire = [network.send_us(num_bytes, each.sockets) + 2 * network.latency_us for each in exchanges]
    ways = {"star": star.cpu_us + wire[0], "relays": tree.cpu_us + group.cpu_us + wire[1] + wire[2]}
    for fanout in options.fanouts:
        ways[f"fan-out {fanout}"] = modelled_us(tree_hops(star.ranks, fanout), cost_us, num_bytes, network)
    return [
        {
            "sequences": replica["sequences"],
            "ranks": star.ranks,
            "way": way,
            "exchange_us": exchange_us,
            "step_us": replica["p50"] + exchange_us,
        }
        for way, exchange_us in ways.items()
    ]


def _summary(
    replicas: list[dict[str, float]], exchanges: list[Exchange], models: list[dict[str, float | str]]
) -> dict[str, object]:
    return {
        "benchmark": "ranks",
        "replicas": replicas,
        "exchanges": [asdict(exchange) for exchange in exchanges],
        "models": models,
        "targets_us": TARGETS_US,
        "load_average": round(os.getloadavg()[0], 1),
    }
