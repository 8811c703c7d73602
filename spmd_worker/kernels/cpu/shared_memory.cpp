// Collectives between processes of one machine through memory that all of them map.
//
// The memory is a line a rank, and twice a slot a rank. In round r a rank puts its part into slot r % 2, says so in its
// line, waits until the others have said r too, and reads their slots. Who says r + 1 has read all of round r, and nobody
// writes slot r % 2 again before all have said r + 1: so two slots suffice and nobody waits twice.
//
// Sums are taken in the order of the ranks, in float, and rounded once: every rank computes the same bits. Whoever waits
// spins for a while and then sleeps until it is woken, so that it takes no core from whom it waits for.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <ctime>

#include "vector.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would be of one process");

struct alignas(128) Line {
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> num_sleepers;
  std::atomic<uint32_t> has_left;
};

struct Group {
  char* memory;
  int64_t rank, size, slot_bytes, spin_ns, timeout_ns;
  const int32_t* processes;  // a descriptor for each rank that becomes readable when its process has gone, or -1

  Line& line(int64_t which) const { return reinterpret_cast<Line*>(memory)[which]; }
  char* slot(uint32_t round, int64_t which) const {
    return memory + size * int64_t(sizeof(Line)) + (int64_t(round % 2) * size + which) * slot_bytes;
  }
};

constexpr int64_t kSleepNs = 20'000'000;  // between two looks at whether the process is there
constexpr int64_t kTimedOut = -1;         // what functions return besides 0 and 1 + the place of a rank that has gone

SPMD_INLINE int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

SPMD_INLINE void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

SPMD_INLINE bool has_come(const Line& line, uint32_t round) {
  // Rounds wrap around.
  return int32_t(line.round.load(std::memory_order_acquire) - round) >= 0;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  timespec limit{0, kSleepNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

bool has_gone(int32_t process) {
  pollfd asked{process, POLLIN, 0};
  return process >= 0 && poll(&asked, 1, 0) > 0;
}

void announce(const Group& group, uint32_t round) {
  Line& own = group.line(group.rank);
  // Sequentially consistent with whoever goes to sleep: it sees the round, or is seen asleep.
  own.round.store(round);
  if (own.num_sleepers.load() > 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own.round), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int64_t wait_for(const Group& group, int64_t which, uint32_t round) {
  Line& line = group.line(which);
  if (has_come(line, round)) return 0;
  const int64_t started = now_ns();
  int64_t waited = 0;
  while (waited < group.spin_ns) {
    for (int turn = 0; turn < 64; ++turn) {
      if (has_come(line, round)) return 0;
      pause_briefly();
    }
    if (line.has_left.load() != 0) break;
    waited = now_ns() - started;
  }
  while (true) {
    line.num_sleepers.fetch_add(1);
    const uint32_t seen = line.round.load();
    if (int32_t(seen - round) < 0 && line.has_left.load() == 0) sleep_while(line.round, seen);
    line.num_sleepers.fetch_sub(1);
    if (has_come(line, round)) return 0;
    if (line.has_left.load() != 0 || has_gone(group.processes[which])) return has_come(line, round) ? 0 : 1 + which;
    if (now_ns() - started > group.timeout_ns) return kTimedOut;
  }
}

// Runs one round: `put` fills this rank's slot, `take` reads all of them.
template <class Put, class Take>
int64_t run_round(const Group& group, Put put, Take take) {
  const uint32_t round = group.line(group.rank).round.load(std::memory_order_relaxed) + 1;
  put(group.slot(round, group.rank));
  announce(group, round);
  for (int64_t which = 0; which < group.size; ++which) {
    if (which == group.rank) continue;
    const int64_t result = wait_for(group, which, round);
    if (result != 0) return result;
  }
  take(round);
  return 0;
}

template <class Element>
SPMD_INLINE Floats some_floats(const Element* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  Element lanes[kLanes] = {};
  std::copy(from, from + count, lanes);
  return load_floats(lanes);
}

template <class Element>
SPMD_INLINE void keep_floats(Element* to, Floats vector, int64_t count) {
  if (count >= kLanes) return store_floats(to, vector);
  Element lanes[kLanes];
  store_floats(lanes, vector);
  std::copy(lanes, lanes + count, to);
}

template <class Element>
int64_t sum(const Group& group, Element* values, int64_t count) {
  const int64_t most = group.slot_bytes / int64_t(sizeof(Element));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t here = std::min(most, count - first);
    Element* part = values + first;
    const int64_t result = run_round(
        group, [&](char* slot) { std::memcpy(slot, part, here * sizeof(Element)); },
        [&](uint32_t round) {
          for (int64_t place = 0; place < here; place += kLanes) {
            Floats total = some_floats(reinterpret_cast<Element*>(group.slot(round, 0)) + place, here - place);
            for (int64_t which = 1; which < group.size; ++which)
              total =
                  total + some_floats(reinterpret_cast<Element*>(group.slot(round, which)) + place, here - place);
            keep_floats(part + place, total, here - place);
          }
        });
    if (result != 0) return result;
  }
  return 0;
}

}  // namespace

#define SPMD_GROUP                                                                                                     \
  char *memory, int64_t rank, int64_t size, int64_t slot_bytes, int64_t spin_ns, int64_t timeout_ns,                   \
      const int32_t *processes
#define SPMD_THE_GROUP \
  { memory, rank, size, slot_bytes, spin_ns, timeout_ns, processes }

extern "C" int64_t spmd_shared_header_bytes(int64_t size) { return size * int64_t(sizeof(Line)); }

// This rank takes part in nothing any more: whoever waits for it is told.
extern "C" int64_t spmd_shared_leave(SPMD_GROUP) {
  const Group group SPMD_THE_GROUP;
  Line& own = group.line(rank);
  own.has_left.store(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own.round), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  return 0;
}

extern "C" int64_t spmd_shared_sum_float32(SPMD_GROUP, float* values, int64_t count) {
  return sum(SPMD_THE_GROUP, values, count);
}

extern "C" int64_t spmd_shared_sum_bfloat16(SPMD_GROUP, uint16_t* values, int64_t count) {
  return sum(SPMD_THE_GROUP, values, count);
}

// `num_bytes` of every rank, one after another.
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

// What the rank `source` has, to all.
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
