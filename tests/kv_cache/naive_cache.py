"""The cache manager once more, as slow and plain as it can be said: a dict of lists, and nothing counted twice.

No links, no reference counts, no index by block: what is owned, named or free is looked up in the tables themselves. It
predicts every answer of `CacheManager`, block numbers and order included.
"""


class NaiveMemory:
    """Blocks of one memory. `lists` are all lists that own a block of it; who is in none of them is in `free`."""

    def __init__(self, num_blocks, owners):
        self.free = list(range(num_blocks))
        self.names = {}
        self.owners = owners

    def is_owned(self, block):
        return any(block in owned for owned in self.owners())

    def is_shared(self, block):
        return sum(owned.count(block) for owned in self.owners()) > 1 or block in self.names.values()

    def take(self, count):
        """The next blocks, and the names that are lost with them."""
        taken, self.free = self.free[:count], self.free[count:]
        lost = [(name, block) for block in taken for name, named in self.names.items() if named == block]
        for name, _ in lost:
            del self.names[name]
        return taken, lost

    def pick_up(self, blocks):
        """Found blocks get an owner."""
        self.free = [block for block in self.free if block not in blocks]

    def let_go(self, block):
        """A block has just left one of the lists."""
        if not self.is_owned(block):
            if block in self.names.values():
                self.free.append(block)
            else:
                self.free.insert(0, block)

    def let_go_of_all(self, blocks):
        """Empty a list, its last block first."""
        while blocks:
            self.let_go(blocks.pop())

    def name(self, block, name):
        if name in self.names or block in self.names.values():
            return False
        self.names[name] = block
        return True

    def find_chain(self, names):
        found = []
        for name in names:
            if name not in self.names:
                break
            found.append(self.names[name])
        return found


class NaiveCache:
    """Tables by key. A transfer is a dict of lists: what it stores, and names, places and blocks of what it loads."""

    def __init__(self, num_blocks, block_size, watermark_blocks, num_host_blocks, num_slots):
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark_blocks
        self.has_connector = num_slots > 0
        self.tables, self.host_tables, self.read_by_step = {}, {}, []
        self.device = NaiveMemory(num_blocks, lambda: [*self.tables.values(), *self.loading_blocks()])
        self.host = NaiveMemory(num_host_blocks, lambda: [*self.host_tables.values(), self.read_by_step])
        self.tier = NaiveMemory(num_slots, self.reserved_places)
        # What a block will hold when the step has run, where that is not what it holds now.
        self.arrives, self.leaves = {}, {}
        self.fresh = []
        self.planned, self.in_flight, self.number = new_transfer(), {}, 1
        self.storing, self.loading, self.store_pairs = {}, {}, []

    # Beyond the device.

    def transfers(self):
        return [self.planned, *self.in_flight.values()]

    def loading_blocks(self):
        return [each["blocks"] for each in self.transfers()]

    def reserved_places(self):
        stored = [place for each in self.transfers() for _, place in each["stores"]]
        return [stored, *[each["places"] for each in self.transfers()]]

    def store(self, name, block):
        if name in self.tier.names and name not in self.storing:
            place = self.tier.names[name]
            self.tier.pick_up([place])
            self.tier.let_go(place)
        elif name not in self.storing and self.tier.free:
            (place,), _ = self.tier.take(1)
            self.storing[name] = place
            self.planned["stores"].append((name, place))
            self.store_pairs.append((block, place))

    def load_prefix(self, prefix, names, num_tokens):
        rest = names[len(prefix) :]
        if not self.has_connector or not rest:
            return None
        awaited = None
        while rest and rest[0] in self.loading:
            awaited = self.loading[rest[0]]
            rest = rest[1:]
        places = self.tier.find_chain(rest)
        is_here = [name in self.device.names or name in self.loading for name in rest]
        places = places[: is_here.index(True)] if True in is_here else places
        if not places or not self.can_start(prefix, num_tokens, True):
            return awaited
        # Reserved first: what the load drives out is stored, and must not take these places.
        self.tier.pick_up(places)
        self.planned["places"] += places
        # Nor is the prefix driven out; it has been used just now.
        self.adopt("prefix", prefix)
        self.planned["blocks"] += self.take(len(places))
        self.release("prefix")
        del self.tables["prefix"]
        self.planned["names"] += rest[: len(places)]
        self.loading |= dict.fromkeys(rest[: len(places)], self.number)
        return self.number

    def finish_transfer(self, number):
        transfer = self.in_flight[number]
        for name, place in transfer["stores"]:
            if self.storing.get(name) == place:
                del self.storing[name]
                self.tier.name(place, name)
        while transfer["stores"]:
            self.tier.let_go(transfer["stores"].pop(0)[1])
        self.tier.let_go_of_all(transfer["places"])
        for name, block in zip(transfer["names"], transfer["blocks"]):
            if self.loading.get(name) == number:
                del self.loading[name]
                self.device.name(block, name)
        self.device.let_go_of_all(transfer["blocks"])
        del self.in_flight[number]

    # The device.

    def are_free(self, count, keep_watermark):
        return count + (self.watermark if keep_watermark else 0) <= len(self.device.free)

    def num_blocks_for(self, num_tokens):
        return (num_tokens + self.block_size - 1) // self.block_size

    def take(self, count):
        taken, lost = self.device.take(count)
        for name, block in lost:
            if self.has_connector and block not in self.arrives:
                self.store(name, block)
        for block in taken:
            self.arrives.pop(block, None)
        return taken

    def shared_indices(self, key, first_token, num_tokens):
        blocks = self.tables[key]
        touched = {position // self.block_size for position in range(first_token, num_tokens)}
        return [index for index in sorted(touched) if index < len(blocks) and self.device.is_shared(blocks[index])]

    def num_new_blocks(self, key, first_token, num_tokens):
        num_appended = max(0, self.num_blocks_for(num_tokens) - len(self.tables[key]))
        return len(self.shared_indices(key, first_token, num_tokens)) + num_appended

    def extend(self, key, first_token, num_tokens):
        """What `TableChange` says: the index of the first entry that is new, and the entries from there on."""
        blocks, shared = self.tables[key], self.shared_indices(key, first_token, num_tokens)
        first_changed = min(shared, default=len(blocks))
        taken = self.take(self.num_new_blocks(key, first_token, num_tokens))
        for index in shared:
            old, blocks[index] = blocks[index], taken.pop(0)
            if index * self.block_size < first_token:
                self.copy(old, blocks[index])
            self.device.let_go(old)
        blocks += taken
        return first_changed, tuple(blocks[first_changed:])

    def copy(self, source, destination):
        self.arrives[destination] = self.arrives.get(source, ("device", source))
        if self.arrives[destination] == ("device", destination):
            del self.arrives[destination]

    def fork(self, key, child):
        self.tables[child] = list(self.tables[key])

    def release(self, key):
        self.device.let_go_of_all(self.tables[key])

    def set_hashes(self, key, names, first_index, num_written_tokens):
        for index in range(first_index, len(names)):
            block = self.tables[key][index]
            if self.device.name(block, names[index]) and (index + 1) * self.block_size > num_written_tokens:
                self.fresh.append(block)

    def can_start(self, prefix, num_tokens, keep_watermark):
        num_new = self.num_blocks_for(num_tokens) - len(prefix)
        return self.are_free(num_new + sum(block in self.device.free for block in prefix), keep_watermark)

    def adopt(self, key, prefix):
        self.tables[key] = list(prefix)
        self.device.pick_up(prefix)

    # To the host and back.

    def swap_out(self, key, names):
        """The indices of the blocks that are copied, or None."""
        blocks = self.tables[key]
        if any(block in self.fresh or block in self.arrives for block in blocks):
            return None
        held = [self.host.names.get(name) for name in names[: len(blocks)]]
        held += [None] * (len(blocks) - len(held))
        missing = [index for index, block in enumerate(held) if block is None]
        if len(missing) > sum(block not in held for block in self.host.free):
            return None
        self.host.pick_up([block for block in held if block is not None])
        taken, _ = self.host.take(len(missing))
        for index, host_block in zip(missing, taken):
            held[index] = host_block
            self.leaves[host_block] = blocks[index]
            if index < len(names):
                self.host.name(host_block, names[index])
        self.host_tables[key] = held
        self.release(key)
        return missing

    def held(self, key, names):
        on_device = [self.device.names.get(name) for name in names[: len(self.host_tables[key])]]
        return on_device + [None] * (len(self.host_tables[key]) - len(on_device))

    def can_swap_in(self, key, names, num_tokens, keep_watermark):
        held = self.held(key, names)
        num_blocks = max(len(held), self.num_blocks_for(num_tokens))
        num_shared = sum(block is not None and block not in self.device.free for block in held)
        return self.are_free(num_blocks - num_shared, keep_watermark)

    def swap_in(self, key, names):
        blocks, host_blocks = self.held(key, names), self.host_tables[key]
        missing = [index for index, block in enumerate(blocks) if block is None]
        self.tables[key] = [block for block in blocks if block is not None]
        self.device.pick_up(self.tables[key])
        for index, block in zip(missing, self.take(len(missing))):
            blocks[index] = block
            self.arrives[block] = ("host", host_blocks[index])
        self.tables[key] = blocks
        for index in missing:
            if index < len(names):
                self.device.name(blocks[index], names[index])
        self.read_by_step += reversed(host_blocks)
        del self.host_tables[key]

    def release_host(self, key):
        self.host.let_go_of_all(self.host_tables[key])
        del self.host_tables[key]

    # All of it.

    def reset_prefix_cache(self):
        for memory in (self.device, self.host, self.tier):
            memory.names.clear()
        self.fresh.clear()
        self.storing.clear()
        self.loading.clear()

    def end_step(self):
        """The step's moves: kind -> pairs, and the number of its transfer."""
        pairs = {
            "copy": [(source, block) for block, (memory, source) in self.arrives.items() if memory == "device"],
            "swap_in": [(source, block) for block, (memory, source) in self.arrives.items() if memory == "host"],
            "swap_out": [(block, host_block) for host_block, block in self.leaves.items()],
            "store": self.store_pairs,
            "load": list(zip(self.planned["places"], self.planned["blocks"])),
        }
        number = self.number if pairs["store"] or pairs["load"] else 0
        if number:
            self.in_flight[number] = self.planned
            self.number, self.planned = number + 1, new_transfer()
        self.arrives, self.leaves, self.store_pairs = {}, {}, []
        self.fresh.clear()
        while self.read_by_step:
            self.host.let_go(self.read_by_step.pop(0))
        return pairs, number


def new_transfer():
    return {"stores": [], "names": [], "places": [], "blocks": []}
