// A queue of completions: any thread pushes an id, one reader sleeps until the
// first.

#ifndef JTURNIP_XLA_EXT_COMPLETION_QUEUE_H_
#define JTURNIP_XLA_EXT_COMPLETION_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace jturnip {

// Now, on the clock of Python's time.perf_counter() (CLOCK_MONOTONIC on Linux).
int64_t NowNanoseconds();

struct Completion {
  int64_t id;
  int64_t nanoseconds;  // when it was pushed, as NowNanoseconds() counts
};

// Thread-safe. Knows nothing of Python, so no call here ever waits for the GIL.
class CompletionQueue {
 public:
  void Push(int64_t id);

  // Takes everything queued, oldest first; times never decrease. Never sleeps.
  std::vector<Completion> TakeAll();

  // Sleeps until something is queued or `deadline` (as NowNanoseconds() counts)
  // passes.
  void WaitUntil(int64_t deadline);

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Completion> completions_;  // in the order pushed
};

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_COMPLETION_QUEUE_H_
