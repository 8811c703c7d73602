// Waiting for a word in memory that another thread changes: spin pause and futex sleep.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "vector.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

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

// Sleeps until the word is not `value`, a wake-up, or `limit_ns`; may return earlier.
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t limit_ns) {
#if defined(__linux__)
  timespec limit{time_t(limit_ns / 1'000'000'000), long(limit_ns % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
#else
  const timespec moment{0, 1'000'000};
  if (limit_ns > 0 && word.load() == value) nanosleep(&moment, nullptr);
#endif
}

inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace
