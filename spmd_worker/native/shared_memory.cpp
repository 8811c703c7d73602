// Collectives between processes of one machine through memory that all of them map.
//
// The memory has, per rank, three lines, two slots, and two slots for messages to the next rank; and one common area for
// joint results. In round r a rank writes its part to slot r % 2, publishes r in its line, waits until the others have
// published r, and reads their slots. A rank that publishes r + 1 has read all of round r, and no rank writes slot r % 2
// again before all have published r + 1: so two slots suffice, with one wait per round.
//
// Message n from a rank to the next goes into its slot n % 2 of those, once message n - 2 has been received: the sender counts
// in its second line, the receiver in its third.
//
// Sums of elements, which are exact, are in the order of the ranks. Sums of float parts are a binary tree over the ranks
// (ranks/leaves.py). Both are in float and rounded once: every rank computes the same bits. A waiting rank spins for a while
// and then sleeps until it is woken, so that it takes no core from the rank that it waits for.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>

#include "exports.h"
#include "norm_rows.h"
#include "waiting.h"

#if defined(__linux__)
#include <poll.h>
#include <unistd.h>

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would be of one process");

struct alignas(128) Line {
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> num_sleepers;
  std::atomic<uint32_t> has_left;
};

constexpr int64_t kLinesARank = 3;

struct Group {
  char* memory;
  int64_t rank, size, slot_bytes, spin_ns, timeout_ns;
  const int32_t* processes;  // a descriptor for each rank that becomes readable when its process exits, or -1
  int64_t few_elements;      // of a sum with its norm; ranks divide the rows of larger ones

  Line& line(int64_t which) const { return reinterpret_cast<Line*>(memory)[which]; }
  Line& sent(int64_t which) const { return line(size + which); }
  Line& taken(int64_t which) const { return line(2 * size + which); }
  char* slot(uint32_t round, int64_t which) const {
    return memory + kLinesARank * size * int64_t(sizeof(Line)) + (int64_t(round % 2) * size + which) * slot_bytes;
  }
  // As large as a slot; valid until the next joint sum.
  char* common() const { return slot(0, 2 * size); }
  char* message(uint32_t number, int64_t which) const { return slot(number, which) + (2 * size + 1) * slot_bytes; }

  // The slot of this rank's part in the next round, null if the part is larger.
  char* next_part(int64_t num_bytes) const {
    return num_bytes > slot_bytes ? nullptr : slot(line(rank).round.load(std::memory_order_relaxed) + 1, rank);
  }
  // The area of the joint norms of a sum of float parts, null if each rank computes all of them: parts of one round.
  char* common_norms(int64_t num_elements) const {
    const bool is_shared_out = num_elements >= few_elements && num_elements * int64_t(sizeof(float)) <= slot_bytes;
    return is_shared_out ? common() : nullptr;
  }
};

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kMaxTrees = 7;          // of 1 to 64 ranks
constexpr int64_t kSleepNs = 20'000'000;  // between two checks of the processes
constexpr int64_t kTimedOut = -1;         // return values are this, 0, and 1 + the rank whose process exited

SPMD_INLINE bool has_come(const Line& line, uint32_t round) {
  // Rounds wrap around.
  return int32_t(line.round.load(std::memory_order_acquire) - round) >= 0;
}

bool has_gone(int32_t process) {
  pollfd asked{process, POLLIN, 0};
  return process >= 0 && poll(&asked, 1, 0) > 0;
}

void announce(Line& own, uint32_t round) {
  // Sequentially consistent with ranks that go to sleep: a rank sees the round, or is seen asleep.
  own.round.store(round);
  if (own.num_sleepers.load() > 0) wake_all(own.round);
}

int64_t wait_for(const Group& group, Line& line, int64_t which, uint32_t round) {
  const std::atomic<uint32_t>& has_left = group.line(which).has_left;
  if (has_come(line, round)) return 0;
  const int64_t started = now_ns();
  int64_t waited = 0;
  while (waited < group.spin_ns) {
    for (int turn = 0; turn < 64; ++turn) {
      if (has_come(line, round)) return 0;
      pause_briefly();
    }
    if (has_left.load() != 0) break;
    waited = now_ns() - started;
  }
  while (true) {
    line.num_sleepers.fetch_add(1);
    const uint32_t seen = line.round.load();
    if (int32_t(seen - round) < 0 && has_left.load() == 0) sleep_while(line.round, seen, kSleepNs);
    line.num_sleepers.fetch_sub(1);
    if (has_come(line, round)) return 0;
    if (has_left.load() != 0 || has_gone(group.processes[which])) return has_come(line, round) ? 0 : 1 + which;
    if (now_ns() - started > group.timeout_ns) return kTimedOut;
  }
}

// Runs one round: `put` fills this rank's slot, `take` reads all slots.
template <class Put, class Take>
int64_t run_round(const Group& group, Put put, Take take) {
  const uint32_t round = group.line(group.rank).round.load(std::memory_order_relaxed) + 1;
  put(group.slot(round, group.rank));
  announce(group.line(group.rank), round);
  for (int64_t which = 0; which < group.size; ++which) {
    if (which == group.rank) continue;
    const int64_t result = wait_for(group, group.line(which), which, round);
    if (result != 0) return result;
  }
  take(round);
  return 0;
}

// The slots of one round as parts of a sum.
template <class Element>
struct Parts {
  const Element* parts[kMaxRanks];
  int64_t count;

  Parts(const Group& group, uint32_t round) : count(group.size) {
    for (int64_t which = 0; which < count; ++which) parts[which] = reinterpret_cast<Element*>(group.slot(round, which));
  }

  SPMD_INLINE_MEMBER Floats sum_at(int64_t index, int64_t num_elements) const {
    Floats total = load_some(parts[0] + index, num_elements);
    for (int64_t which = 1; which < count; ++which) total = total + load_some(parts[which] + index, num_elements);
    return as_kept<Element>(total);
  }
};

// The slots of one round as float parts of a sum by the tree over the ranks: neighbours are added level by level, and of a
// number that is no power of two the largest full tree comes first.
template <class Element>
struct Tree {
  const float* parts[kMaxRanks];
  int64_t count;

  Tree(const Group& group, uint32_t round) : count(group.size) {
    for (int64_t which = 0; which < count; ++which) parts[which] = reinterpret_cast<float*>(group.slot(round, which));
  }

  template <int kCount>
  SPMD_INLINE_MEMBER Floats full_tree(int64_t first, int64_t index, int64_t num_elements) const {
    if constexpr (kCount == 1) return load_some(parts[first] + index, num_elements);
    else
      return full_tree<kCount / 2>(first, index, num_elements) +
             full_tree<kCount / 2>(first + kCount / 2, index, num_elements);
  }

  // Full trees of falling sizes, of which the last two are joined while they are of one size, and at the end.
  Floats any_tree(int64_t index, int64_t num_elements) const {
    Floats trees[kMaxTrees];
    int64_t num_trees = 0;
    for (int64_t which = 0; which < count; ++which) {
      Floats total = load_some(parts[which] + index, num_elements);
      for (int64_t rest = which; rest % 2 == 1; rest /= 2) total = trees[--num_trees] + total;
      trees[num_trees++] = total;
    }
    Floats total = trees[--num_trees];
    while (num_trees > 0) total = trees[--num_trees] + total;
    return total;
  }

  SPMD_INLINE_MEMBER Floats sum_at(int64_t index, int64_t num_elements) const {
    if (count == 2) return as_kept<Element>(full_tree<2>(0, index, num_elements));
    if (count == 4) return as_kept<Element>(full_tree<4>(0, index, num_elements));
    if (count == 8) return as_kept<Element>(full_tree<8>(0, index, num_elements));
    return as_kept<Element>(any_tree(index, num_elements));
  }
};

// A part that was computed in the slot itself is not copied.
void put_into(char* slot, const void* part, int64_t num_bytes) {
  if (slot != part) std::memmove(slot, part, num_bytes);
}

// In place, so the values cannot be in a slot, which other ranks read.
template <class Element>
int64_t sum(const Group& group, Element* values, int64_t count) {
  const int64_t most = group.slot_bytes / int64_t(sizeof(Element));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t here = std::min(most, count - first);
    Element* part = values + first;
    const int64_t result = run_round(
        group, [&](char* slot) { std::memcpy(slot, part, here * sizeof(Element)); },
        [&](uint32_t round) {
          const Parts<Element> parts(group, round);
          for (int64_t index = 0; index < here; index += kLanes)
            store_some(part + index, parts.sum_at(index, here - index), here - index);
        });
    if (result != 0) return result;
  }
  return 0;
}

// `to`, which is in no slot, is the sum over ranks of float parts.
template <class Element>
int64_t sum_parts(const Group& group, const float* part, int64_t count, Element* to) {
  const int64_t most = group.slot_bytes / int64_t(sizeof(float));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t here = std::min(most, count - first);
    const int64_t result = run_round(
        group, [&](char* slot) { put_into(slot, part + first, here * sizeof(float)); },
        [&](uint32_t round) {
          const Tree<Element> tree(group, round);
          for (int64_t index = 0; index < here; index += kLanes)
            store_some(to + first + index, tree.sum_at(index, here - index), here - index);
        });
    if (result != 0) return result;
  }
  return 0;
}

// residual += the sum over ranks of x, and `to` is its norm: all [rows][size]. Every rank computes all rows.
template <class Element>
int64_t sum_add_rms_norm_of_all(
    const Group& group, const float* x, Element* residual, int64_t num_rows, int64_t size, const Element* weight,
    float epsilon, Element* to) {
  const int64_t most = group.slot_bytes / (size * int64_t(sizeof(float)));
  for (int64_t first = 0; first < num_rows; first += most) {
    const int64_t here = std::min(most, num_rows - first), done = first * size;
    const int64_t result = run_round(
        group, [&](char* slot) { put_into(slot, x + done, here * size * sizeof(float)); },
        [&](uint32_t round) {
          const Tree<Element> tree(group, round);
          for (int64_t row = 0; row < here * size; row += size) {
            const auto x_at = [&](int64_t index, int64_t count) { return tree.sum_at(row + index, count); };
            add_and_norm_row(x_at, residual + done + row, size, weight, epsilon, to + done + row);
          }
        });
    if (result != 0) return result;
  }
  return 0;
}

// The same with rows divided over ranks, in one round: each rank sums, adds and norms some rows, and all norms are in the
// common area `to` afterwards. Only this rank's rows of `residual` are updated.
template <class Element>
int64_t sum_add_rms_norm_of_some(
    const Group& group, const float* x, Element* residual, int64_t num_rows, int64_t size, const Element* weight,
    float epsilon, Element* to) {
  const int64_t result = run_round(
      group, [&](char* slot) { put_into(slot, x, num_rows * size * sizeof(float)); },
      [&](uint32_t round) {
        const Tree<Element> tree(group, round);
        const int64_t end = num_rows * (group.rank + 1) / group.size * size;
        for (int64_t row = num_rows * group.rank / group.size * size; row < end; row += size) {
          const auto x_at = [&](int64_t index, int64_t count) { return tree.sum_at(row + index, count); };
          add_and_norm_row(x_at, residual + row, size, weight, epsilon, to + row);
        }
      });
  if (result != 0) return result;
  return run_round(group, [](char*) {}, [](uint32_t) {});
}

template <class Element>
int64_t sum_add_rms_norm(
    const Group& group, const float* x, Element* residual, int64_t num_rows, int64_t size, const Element* weight,
    float epsilon, Element* to) {
  Element* const common = reinterpret_cast<Element*>(group.common_norms(num_rows * size));
  if (common != nullptr)
    return sum_add_rms_norm_of_some(group, x, residual, num_rows, size, weight, epsilon, common);
  return sum_add_rms_norm_of_all(group, x, residual, num_rows, size, weight, epsilon, to);
}

}  // namespace

#define SPMD_THE_GROUP \
  { memory, rank, size, slot_bytes, spin_ns, timeout_ns, processes, few_elements }

extern "C" int64_t spmd_shared_header_bytes(int64_t size) { return kLinesARank * size * int64_t(sizeof(Line)); }

// Marks this rank as gone: ranks that wait for it return.
extern "C" int64_t spmd_shared_leave(SPMD_GROUP) {
  const Group group SPMD_THE_GROUP;
  Line& own = group.line(rank);
  own.has_left.store(1);
  for (Line* line : {&own, &group.sent(rank), &group.taken(rank)})
    wake_all(line->round);
  return 0;
}

// The buffer of this rank's part in the next round, which is then not copied; null if the part is larger.
extern "C" char* spmd_shared_next_part(SPMD_GROUP, int64_t num_bytes) {
  const Group group SPMD_THE_GROUP;
  return group.next_part(num_bytes);
}

// The area of the joint norms, valid until the next sum; null if they go to the caller's memory.
extern "C" char* spmd_shared_common_norms(SPMD_GROUP, int64_t num_elements) {
  const Group group SPMD_THE_GROUP;
  return group.common_norms(num_elements);
}

#define SPMD_SUMS(name, Element)                                                                                       \
  extern "C" int64_t spmd_shared_sum_##name(SPMD_GROUP, Element* values, int64_t count) {                              \
    return sum(SPMD_THE_GROUP, values, count);                                                                         \
  }                                                                                                                    \
  extern "C" int64_t spmd_shared_sum_parts_##name(SPMD_GROUP, const float* part, int64_t count, Element* to) {         \
    return sum_parts(SPMD_THE_GROUP, part, count, to);                                                                 \
  }                                                                                                                    \
  extern "C" int64_t spmd_shared_sum_add_rms_norm_##name(                                                              \
      SPMD_GROUP, const float* x, Element* residual, int64_t num_rows, int64_t row_size, const Element* weight,        \
      float epsilon, Element* to) {                                                                                    \
    return sum_add_rms_norm(SPMD_THE_GROUP, x, residual, num_rows, row_size, weight, epsilon, to);                     \
  }

SPMD_SUMS(float32, float)
SPMD_SUMS(bfloat16, uint16_t)

// Gathers `num_bytes` of every rank, in order.
extern "C" int64_t spmd_shared_gather(SPMD_GROUP, const char* from, int64_t num_bytes, char* to) {
  const Group group SPMD_THE_GROUP;
  for (int64_t first = 0; first < num_bytes; first += slot_bytes) {
    const int64_t here = std::min(slot_bytes, num_bytes - first);
    const int64_t result = run_round(
        group, [&](char* slot) { std::memcpy(slot, from + first, here); },
        [&](uint32_t round) {
          for (int64_t which = 0; which < size; ++which)
            std::memcpy(to + which * num_bytes + first, group.slot(round, which), here);
        });
    if (result != 0) return result;
  }
  return 0;
}

// Sends to the next rank, after it has received the message before the last.
extern "C" int64_t spmd_shared_send(SPMD_GROUP, const char* data, int64_t num_bytes) {
  const Group group SPMD_THE_GROUP;
  const uint32_t number = group.sent(rank).round.load(std::memory_order_relaxed) + 1;
  const int64_t result = wait_for(group, group.taken(rank + 1), rank + 1, number - 2);
  if (result != 0) return result;
  std::memcpy(group.message(number, rank), data, num_bytes);
  announce(group.sent(rank), number);
  return 0;
}

// Receives from the previous rank.
extern "C" int64_t spmd_shared_receive(SPMD_GROUP, char* data, int64_t num_bytes) {
  const Group group SPMD_THE_GROUP;
  const uint32_t number = group.taken(rank).round.load(std::memory_order_relaxed) + 1;
  const int64_t result = wait_for(group, group.sent(rank - 1), rank - 1, number);
  if (result != 0) return result;
  std::memcpy(data, group.message(number, rank - 1), num_bytes);
  announce(group.taken(rank), number);
  return 0;
}

// Broadcasts from rank `source`.
extern "C" int64_t spmd_shared_broadcast(SPMD_GROUP, int64_t source, char* data, int64_t num_bytes) {
  const Group group SPMD_THE_GROUP;
  for (int64_t first = 0; first < num_bytes; first += slot_bytes) {
    const int64_t here = std::min(slot_bytes, num_bytes - first);
    const int64_t result = run_round(
        group,
        [&](char* slot) {
          if (rank == source) std::memcpy(slot, data + first, here);
        },
        [&](uint32_t round) {
          if (rank != source) std::memcpy(data + first, group.slot(round, source), here);
        });
    if (result != 0) return result;
  }
  return 0;
}

#endif
