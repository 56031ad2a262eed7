#include "completion_queue.h"

#include <chrono>
#include <utility>

namespace jturnip {

namespace {
using Clock = std::chrono::steady_clock;
}

int64_t NowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             Clock::now().time_since_epoch())
      .count();
}

void CompletionQueue::Push(int64_t id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // The clock is read under the lock, so that times are in the order of the
    // queue.
    completions_.push_back({id, NowNanoseconds()});
  }
  arrived_.notify_one();
}

std::vector<Completion> CompletionQueue::TakeAll() {
  std::vector<Completion> taken;
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(taken, completions_);
  return taken;
}

void CompletionQueue::WaitUntil(int64_t deadline) {
  const Clock::time_point when{std::chrono::nanoseconds(deadline)};
  std::unique_lock<std::mutex> lock(mutex_);
  arrived_.wait_until(lock, when, [this] { return !completions_.empty(); });
}

}  // namespace jturnip
