// The threads of thread_pool.h.

#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <cstdio>
#if defined(__linux__)
#include <dlfcn.h>
#include <sched.h>
#endif
#include <vector>

#include "waiting.h"

#if defined(SPMD_PLANTED_DELAYS)
#include <unistd.h>
#endif

namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kWorkerSpinNs = 200'000;  // between jobs of a step; between steps a worker sleeps
constexpr int64_t kCallerSpinNs = 50'000;   // at least, for items of other threads: see `wait_for_items`
constexpr int64_t kSleepNs = 10'000'000'000;
constexpr uint64_t kClosed = 0xffffffff;    // as a ticket's next item: above any count

#if defined(SPMD_PLANTED_DELAYS)
// For tests: threads lose their cores at random, within items.
void delay_at_random() {
  static std::atomic<uint32_t> seeds{1};
  static thread_local uint32_t state = seeds.fetch_add(1) * 2654435761u;
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  if (state % 8 == 0) usleep(state / 8 % 300);
}
#else
SPMD_INLINE void delay_at_random() {}
#endif

// Spins until `is_over`, for at most `limit_ns`; returns whether it is.
template <class Condition>
bool spin_until(Condition is_over, int64_t limit_ns) {
  if (is_over()) return true;
  const int64_t started = now_ns();
  do {
    for (int turn = 0; turn < 32; ++turn) {
      if (is_over()) return true;
      pause_briefly();
    }
  } while (now_ns() - started < limit_ns);
  return false;
}

// The handling of subnormal numbers is a setting of each thread, which may have been changed in the calling thread: while
// items are computed it is the default in every thread.
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  DefaultFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~DefaultFloats() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

#if defined(__linux__)
// The cores of all OpenMP places, if the user has bound its threads to places: the thread that loaded OpenMP is bound to the
// first place, and new threads would inherit that. False without places.
bool find_places(cpu_set_t& cores) {
  void* openmp = dlopen("libgomp.so.1", RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
  if (openmp == nullptr) return false;
  const auto num_places = reinterpret_cast<int (*)()>(dlsym(openmp, "omp_get_num_places"));
  const auto num_cores = reinterpret_cast<int (*)(int)>(dlsym(openmp, "omp_get_place_num_procs"));
  const auto cores_of = reinterpret_cast<void (*)(int, int*)>(dlsym(openmp, "omp_get_place_proc_ids"));
  CPU_ZERO(&cores);
  if (num_places != nullptr && num_cores != nullptr && cores_of != nullptr)
    for (int index = 0; index < num_places(); ++index) {
      std::vector<int> ids(size_t(num_cores(index)));
      cores_of(index, ids.data());
      for (const int id : ids)
        if (id >= 0 && id < CPU_SETSIZE) CPU_SET(id, &cores);
    }
  dlclose(openmp);
  return CPU_COUNT(&cores) > 1;
}
#endif

// One job at a time. The fields of a job are read by threads that have claimed an item, so they stay until all items are
// done; other threads read only the ticket, which names the job.
class ThreadPool {
 public:
  static ThreadPool& of_this_process() {
    // Threads do not survive a fork: the child makes its own.
    static const int is_registered = pthread_atfork(nullptr, nullptr, [] { current() = new ThreadPool; });
    (void)is_registered;
    return *current();
  }

  // Returns false if another thread's job is in flight.
  bool try_run(int64_t num_items, int num_threads, Task task, const void* body) {
    if (is_busy_.exchange(true, std::memory_order_acquire)) return false;
    const int num_workers = int(std::min<int64_t>(num_threads, num_items)) - 1;
    allow_workers(num_threads - 1);
    const int64_t began_ns = now_ns();
    const uint32_t job = started_.load(std::memory_order_relaxed) + 1;
    // Closed first: a thread late for the previous job that sees the new count finds no item to claim.
    ticket_.store(uint64_t(job) << 32 | kClosed, std::memory_order_relaxed);
    count_.store(num_items, std::memory_order_release), limit_.store(num_workers, std::memory_order_relaxed);
    task_ = task, body_ = body;
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store(uint64_t(job) << 32, std::memory_order_release);
    // Sequentially consistent with threads that go to sleep: a thread sees the job, or is seen asleep.
    started_.store(job);
    if (num_sleepers_.load() > 0) wake_all(started_);
    take_part(job);
    wait_for_items(uint32_t(num_items), began_ns);
    is_busy_.store(false, std::memory_order_release);
    return true;
  }

  void read_counters(int64_t* to) const { to[0] = num_jobs_, to[1] = num_waits_, to[2] = waited_ns_, to[3] = num_slept_; }

 private:
  static ThreadPool*& current() {
    static ThreadPool* team = new ThreadPool;  // never deleted: its threads outlive static destructors
    return team;
  }

  void take_part(uint32_t job) {
    const int64_t count = count_.load(std::memory_order_acquire), item = Items::claim(ticket_, job, count);
    if (item < 0) return;
    Items items(&ticket_, job, count, item);
    {
      const DefaultFloats floats;
      task_(body_, items);
    }
    const uint32_t num_taken = uint32_t(items.num_taken());
    const bool is_last = num_done_.fetch_add(num_taken) + num_taken == uint32_t(count);
    if (is_last && caller_sleeps_.load()) wake_all(num_done_);
  }

  // A thread that still computes is in the last item it claimed, which takes not much longer than all that the caller did:
  // if it takes longer, the thread has lost its core.
  void wait_for_items(uint32_t count, int64_t began_ns) {
    ++num_jobs_;
    const auto are_done = [&] { return num_done_.load(std::memory_order_acquire) == count; };
    if (are_done()) return;
    const int64_t started = now_ns();
    if (!spin_until(are_done, std::max(kCallerSpinNs, started - began_ns))) {
      ++num_slept_;
      caller_sleeps_.store(true);
      for (uint32_t seen = num_done_.load(); seen != count; seen = num_done_.load()) sleep_while(num_done_, seen, kSleepNs);
      caller_sleeps_.store(false);
    }
    ++num_waits_;
    waited_ns_ += now_ns() - started;
  }

  void work(int number) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "spmd-team");
#endif
    for (uint32_t seen = 0;;) {
      // Fewer threads are wanted than before.
      for (uint32_t allowed = num_allowed_.load(); number >= int(allowed); allowed = num_allowed_.load())
        sleep_while(num_allowed_, allowed, kSleepNs);
      const auto has_begun = [&] { return started_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(has_begun, kWorkerSpinNs)) {
        num_sleepers_.fetch_add(1);
        while (started_.load() == seen) sleep_while(started_, seen, kSleepNs);
        num_sleepers_.fetch_sub(1);
        continue;
      }
      seen = started_.load(std::memory_order_acquire);
      if (number < limit_.load(std::memory_order_relaxed)) take_part(seen);
    }
  }

  void allow_workers(int wanted) {
    if (wanted == int(num_allowed_.load(std::memory_order_relaxed))) return;
    start_workers(wanted);
    num_allowed_.store(uint32_t(wanted));
    wake_all(num_allowed_);
  }

  // Fewer if the system has no more threads.
  void start_workers(int wanted) {
    if (num_workers_ >= wanted) return;
    sigset_t blocked, before;
    sigfillset(&blocked);  // signals are for the other threads
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&blocked, own);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
#if defined(__linux__)
    if (cpu_set_t cores; find_places(cores)) pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores);
#endif
    for (; num_workers_ < wanted; ++num_workers_) {
      struct Start {
        ThreadPool* team;
        int number;
      };
      const auto run = [](void* start) -> void* {
        const Start mine = *static_cast<Start*>(start);
        delete static_cast<Start*>(start);
        mine.team->work(mine.number);
        return nullptr;
      };
      auto* start = new Start{this, num_workers_};
      pthread_t thread;
      if (pthread_create(&thread, &attributes, run, start) != 0) {
        delete start;
        std::fprintf(
            stderr, "spmd-worker: the system has no more threads for this process: %d of %d compute\n", num_workers_ + 1,
            wanted + 1);
        break;
      }
      pthread_detach(thread);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};    // the job's number and its next item
  alignas(64) std::atomic<uint32_t> started_{0};   // the number of the last job
  std::atomic<uint32_t> num_sleepers_{0}, num_allowed_{0};
  Task task_ = nullptr;
  const void* body_ = nullptr;
  std::atomic<int64_t> count_{0};
  std::atomic<int> limit_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};  // items
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<bool> is_busy_{false};
  int num_workers_ = 0;  // running threads
  int64_t num_jobs_ = 0, num_waits_ = 0, waited_ns_ = 0, num_slept_ = 0;
};

}  // namespace

int64_t Items::claim(std::atomic<uint64_t>& ticket, uint32_t job, int64_t count) {
  uint64_t seen = ticket.load(std::memory_order_acquire);
  while (uint32_t(seen >> 32) == job && int64_t(uint32_t(seen)) < count)
    if (ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      delay_at_random();
      return int64_t(uint32_t(seen));
    }
  return -1;
}

void run_task(int64_t num_items, int64_t num_threads, Task task, const void* body) {
  const int most = int(std::min<int64_t>(num_threads, kMaxThreads));
  if (most > 1 && num_items > 1 && ThreadPool::of_this_process().try_run(num_items, most, task, body)) return;
  Items items(num_items);
  const DefaultFloats floats;
  task(body, items);
}

// Counters of this process: jobs of several threads, jobs at whose end the calling thread waited, nanoseconds of these
// waits, and waits in which it slept because another thread had lost its core.
extern "C" void spmd_thread_pool_counters(int64_t* to) { ThreadPool::of_this_process().read_counters(to); }
