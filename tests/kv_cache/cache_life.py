"""What can be done to a cache in the middle of its life, and fixed random lives made of it.

An operation takes the simulation and a number that decides whatever there is to decide, so that hypothesis and a seeded
generator can both drive it. It does nothing where it is not possible.
"""

from random import Random

from cache_simulation import CacheSimulation, make_simulation

MAX_SEQUENCES = 6


def prompt(number):
    """1 to 14 tokens: zeros, from a place on ones. So many prompts begin alike, and part at various places."""
    num_tokens, split = 1 + number % 14, number // 14 % 5 * 3
    return [0 if index < split else 1 for index in range(num_tokens)]


def begin_prompt(simulation, number):
    if len(simulation.sequences) < MAX_SEQUENCES:
        simulation.start(new_name(simulation), prompt(number))


def begin_prompt_from_cache(simulation, number):
    if len(simulation.sequences) < MAX_SEQUENCES:
        name = new_name(simulation)
        if not simulation.start_from_cache(name, prompt(number), keep_watermark=number % 2 == 0):
            simulation.release(name)
        elif number % 4:
            simulation.extend(name, len(simulation.sequences[name].future), is_named=number % 3 > 0)


def begin_prompt_from_connector(simulation, number):
    if len(simulation.sequences) < MAX_SEQUENCES:
        name = new_name(simulation)
        if not simulation.load_prefix(name, prompt(number)):
            simulation.release(name)


def look_again(simulation, number):
    """A sequence that has nothing, as after a transfer, begins with what can be found now."""
    name = pick(simulation, number, lambda each: each.is_on_device and not each.has_begun)
    if name is not None:
        future = simulation.sequences[name].future
        simulation.release(name)
        if simulation.start_from_cache(name, future):
            simulation.extend(name, len(simulation.sequences[name].future), is_named=number % 3 > 0)


def extend(simulation, number):
    name = pick(simulation, number, can_be_extended)
    if name is not None:
        simulation.extend(name, 1 + number % 7, is_named=number % 3 == 0)


def extend_or_preempt(simulation, number):
    """As a scheduler does, and worse: the sequence that started last makes room, though this step extended it already.

    It is swapped out if that is possible, or it begins again, or ends.
    """
    name = pick(simulation, number, can_be_extended)
    if name is not None:
        ways = (simulation.swap_out, simulation.recompute, simulation.release)
        extend_and_make_room(simulation, name, number, ways, is_named=number % 3 > 0)


def extend_or_release(simulation, number):
    """Without names, so that what is freed is handed out again at once."""
    name = pick(simulation, number, can_be_extended)
    if name is not None:
        extend_and_make_room(simulation, name, number, (simulation.release,), is_named=False)


def extend_and_make_room(simulation, name, number, ways, *, is_named):
    while not simulation.extend(name, 1 + 3 * (number % 4 == 0), is_named=is_named):
        victims = [each for each in simulation.sequences if each != name and simulation.can_leave(each)]
        victims = [each for each in victims if simulation.sequences[each].table.block_ids]
        if not victims:
            if simulation.can_leave(name):
                simulation.release(name)
            return
        if ways[number % len(ways)](victims[-1]) is False:
            simulation.release(victims[-1])


def give_names(simulation, number):
    name = pick(simulation, number, lambda each: each.is_on_device)
    if name is not None:
        simulation.name(name)


def fork(simulation, number):
    name = pick(simulation, number, lambda each: each.is_on_device)
    if name is not None and len(simulation.sequences) < MAX_SEQUENCES:
        simulation.fork(name, new_name(simulation))


def fork_and_extend(simulation, number):
    name = pick(simulation, number, lambda each: each.is_on_device)
    if name is not None and len(simulation.sequences) < MAX_SEQUENCES:
        child = new_name(simulation)
        simulation.fork(name, child)
        simulation.extend(child, 1 + number % 3, is_named=number % 2 == 0)


def extend_and_fork(simulation, number):
    """The child is shorter than what its parent's blocks are known for."""
    name = pick(simulation, number, can_be_extended)
    if name is not None and len(simulation.sequences) < MAX_SEQUENCES:
        num_tokens = simulation.block_size - len(simulation.sequences[name].tokens) % simulation.block_size
        if simulation.extend(name, num_tokens, is_named=True):
            simulation.fork(name, new_name(simulation))


def release(simulation, number):
    name = pick(simulation, number, lambda each: each.transfer is None)
    if name is not None and simulation.can_leave(name):
        simulation.release(name)


def recompute(simulation, number):
    name = pick(simulation, number, lambda each: each.is_on_device)
    if name is not None and simulation.can_leave(name):
        simulation.recompute(name)


def swap_out(simulation, number):
    name = pick(simulation, number, lambda each: each.is_on_device)
    if name is not None:
        simulation.swap_out(name)


def swap_in(simulation, number):
    name = pick(simulation, number, lambda each: each.host_table is not None)
    if name is not None:
        simulation.swap_in(name)


def swap_in_and_fork(simulation, number):
    """Forks of what arrives in this very step."""
    name = pick(simulation, number, lambda each: each.host_table is not None)
    if name is not None and simulation.swap_in(name) and len(simulation.sequences) < MAX_SEQUENCES:
        child = new_name(simulation)
        simulation.fork(name, child)
        simulation.extend(child, 1 + number % 3)


def swap_in_and_release(simulation, number):
    """Blocks that can be found, and hold nothing before the step runs."""
    name = pick(simulation, number, lambda each: each.host_table is not None)
    if name is not None and simulation.swap_in(name) and simulation.can_leave(name):
        simulation.release(name)


def finish_transfer(simulation, number):
    simulation.finish_transfer(number)


def reset_prefix_cache(simulation, number):
    if not any(sequence.planned for sequence in simulation.sequences.values()):
        simulation.reset_prefix_cache()


def run_step(simulation, number):
    simulation.run_step()


def can_be_extended(sequence):
    return sequence.is_on_device and not sequence.planned


def pick(simulation, number, is_possible):
    names = [name for name, sequence in simulation.sequences.items() if is_possible(sequence)]
    return names[number % len(names)] if names else None


def new_name(simulation):
    simulation.num_started += 1
    return str(simulation.num_started)


OPERATIONS = {
    begin_prompt: 1,
    begin_prompt_from_cache: 8,
    begin_prompt_from_connector: 8,
    look_again: 6,
    extend: 5,
    extend_or_preempt: 5,
    extend_or_release: 1,
    give_names: 3,
    fork: 2,
    fork_and_extend: 3,
    extend_and_fork: 2,
    release: 8,
    recompute: 2,
    swap_out: 2,
    swap_in: 5,
    swap_in_and_fork: 2,
    swap_in_and_release: 2,
    finish_transfer: 4,
    reset_prefix_cache: 0.2,
    run_step: 7,
}
"""With how often each comes in a fixed random life."""
MANY_FORKS = {begin_prompt: 1, extend_or_release: 6, fork: 4, release: 1, run_step: 1}
MANY_LOADS = OPERATIONS | {begin_prompt_from_connector: 30, release: 20, finish_transfer: 8, swap_out: 0.5}


def end_everything(simulation: CacheSimulation):
    simulation.run_step()
    while simulation.memories.in_flight:
        simulation.finish_transfer(0)
    for name in list(simulation.sequences):
        simulation.release(name)
    simulation.check_integrity()
    manager = simulation.manager
    num_left = manager.num_used_blocks, manager.num_used_host_blocks
    assert num_left == (0, 0), f"the end leaves {num_left[0]} blocks in use on the device, {num_left[1]} on the host"


LIVES = [
    (6_000, OPERATIONS, {"num_blocks": 8, "block_size": 4, "num_host_blocks": 6, "num_slots": 6}),
    (6_000, OPERATIONS, {"num_blocks": 16, "block_size": 2, "num_host_blocks": 9, "num_slots": 12}),
    (6_000, OPERATIONS, {"num_blocks": 16, "block_size": 1, "num_host_blocks": 12, "num_slots": 6}),
    (4_000, MANY_LOADS, {"num_blocks": 8, "block_size": 3, "num_host_blocks": 3, "num_slots": 20}),
    (4_000, MANY_LOADS, {"num_blocks": 10, "block_size": 2, "num_host_blocks": 3, "num_slots": 5}),
    (15_000, MANY_FORKS, {"num_blocks": 7, "block_size": 4, "num_host_blocks": 2, "num_slots": 3}),
]


OPERATIONS_A_TURN = 1000


def live_randomly(*, times=1, **broken):
    """Fixed random lives of several kinds, in turns: most of what one of them finds it finds early. Raises
    AssertionError as soon as contents or counts are wrong. `times` as long as they are listed.
    """
    lives = [
        _life(seed, times * num_operations, weights, sizes, broken)
        for seed, (num_operations, weights, sizes) in enumerate(LIVES)
    ]
    while lives:
        lives = [life for life in lives if next(life, None) is not None]


def _life(seed, num_operations, weights, sizes, broken):
    """Yields after every turn."""
    simulation, random = make_simulation(**sizes, **broken), Random(seed)
    operations = random.choices(list(weights), list(weights.values()), k=num_operations)
    for number, operation in enumerate(operations, start=1):
        operation(simulation, random.randrange(1000))
        simulation.check_integrity()
        if number % OPERATIONS_A_TURN == 0:
            yield number
    end_everything(simulation)
