// The threads of team.h, and how they wait.

#include "team.h"

#include <pthread.h>
#include <signal.h>

#include "waiting.h"

#if defined(SPMD_PLANTED_DELAYS)
#include <unistd.h>
#endif

namespace {

constexpr int kMostThreads = 256;
constexpr int64_t kWorkerSpinNs = 200'000;  // between two jobs of a step; between two steps a worker sleeps
constexpr int64_t kCallerSpinNs = 50'000;   // for what other threads still compute: longer than that, they have no core
constexpr int64_t kSleepNs = 10'000'000'000;
constexpr uint64_t kClosed = 0xffffffff;    // in place of a ticket's next item: more than any count

#if defined(SPMD_PLANTED_DELAYS)
// For tests: threads lose their cores at random, in the midst of items.
void delay_at_random() {
  static std::atomic<uint32_t> seeds{1};
  static thread_local uint32_t state = seeds.fetch_add(1) * 2654435761u;
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  if (state % 8 == 0) usleep(state / 8 % 300);
}
#else
SPMD_INLINE void delay_at_random() {}
#endif

// Until `is_over`, for at most `limit_ns`; whether it is.
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

// One job at a time. What is written of a job is read by those who have claimed an item of it, so it stays as it is until
// all items are done; only the ticket, which names the job, is looked at by others.
class Team {
 public:
  static Team& of_this_process() {
    // Threads do not survive a fork: the child makes its own.
    static const int is_registered = pthread_atfork(nullptr, nullptr, [] { current() = new Team; });
    (void)is_registered;
    return *current();
  }

  // False: another thread's job is under way.
  bool try_run(int64_t num_items, int num_workers, Task task, const void* body) {
    if (is_busy_.exchange(true, std::memory_order_acquire)) return false;
    start_workers(num_workers);
    const uint32_t job = started_.load(std::memory_order_relaxed) + 1;
    // Closed first: who comes late to the job before and sees the new count finds no item to claim with it.
    ticket_.store(uint64_t(job) << 32 | kClosed, std::memory_order_relaxed);
    count_.store(num_items, std::memory_order_release), limit_.store(num_workers, std::memory_order_relaxed);
    task_ = task, body_ = body;
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store(uint64_t(job) << 32, std::memory_order_release);
    // Sequentially consistent with whoever goes to sleep: it sees the job, or is seen asleep.
    started_.store(job);
    if (num_sleepers_.load() > 0) wake_all(started_);
    take_part(job);
    wait_for_items(uint32_t(num_items));
    is_busy_.store(false, std::memory_order_release);
    return true;
  }

  void read_counters(int64_t* to) const { to[0] = num_jobs_, to[1] = num_waits_, to[2] = waited_ns_, to[3] = num_slept_; }

 private:
  static Team*& current() {
    static Team* team = new Team;  // never deleted: its threads outlive what ends with the process
    return team;
  }

  void take_part(uint32_t job) {
    const int64_t count = count_.load(std::memory_order_acquire), item = Items::claim(ticket_, job, count);
    if (item < 0) return;
    Items items(&ticket_, job, count, item);
    task_(body_, items);
    const uint32_t num_taken = uint32_t(items.num_taken());
    const bool is_last = num_done_.fetch_add(num_taken) + num_taken == uint32_t(count);
    if (is_last && caller_sleeps_.load()) wake_all(num_done_);
  }

  void wait_for_items(uint32_t count) {
    ++num_jobs_;
    const auto are_done = [&] { return num_done_.load(std::memory_order_acquire) == count; };
    if (are_done()) return;
    const int64_t started = now_ns();
    if (!spin_until(are_done, kCallerSpinNs)) {
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
      const auto has_begun = [&] { return started_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(has_begun, kWorkerSpinNs)) {
        num_sleepers_.fetch_add(1);
        while (started_.load() == seen) sleep_while(started_, seen, kSleepNs);
        num_sleepers_.fetch_sub(1);
      }
      seen = started_.load(std::memory_order_acquire);
      if (number < limit_.load(std::memory_order_relaxed)) take_part(seen);
    }
  }

  // Fewer, where the system has no more threads for us.
  void start_workers(int wanted) {
    if (num_workers_ >= wanted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that were there
    for (wanted = std::min(wanted, kMostThreads); num_workers_ < wanted; ++num_workers_) {
      struct Start {
        Team* team;
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
      if (pthread_create(&thread, nullptr, run, start) != 0) {
        delete start;
        break;
      }
      pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};    // the job's number and its next item
  alignas(64) std::atomic<uint32_t> started_{0};   // the number of the last job
  std::atomic<uint32_t> num_sleepers_{0};
  Task task_ = nullptr;
  const void* body_ = nullptr;
  std::atomic<int64_t> count_{0};
  std::atomic<int> limit_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};  // items
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<bool> is_busy_{false};
  int num_workers_ = 0;
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
  const int num_workers = int(std::min<int64_t>({num_threads, num_items, kMostThreads})) - 1;
  if (num_workers > 0 && Team::of_this_process().try_run(num_items, num_workers, task, body)) return;
  Items items(num_items);
  task(body, items);
}

// Of this process so far: jobs of several threads, how many the calling thread waited at the end of, for how many
// nanoseconds, and how many of them it slept for: those whose items others had no core for.
extern "C" void spmd_team_counters(int64_t* to) { Team::of_this_process().read_counters(to); }
