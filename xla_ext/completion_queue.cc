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
    only_marks_ = false;
  }
  arrived_.notify_one();
}

void CompletionQueue::ExpectMark() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++expected_;
}

void CompletionQueue::PushMark(int64_t id) {
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completions_.push_back({id, NowNanoseconds()});
    --expected_;
    wake = IsWorthTaking(few_);
  }
  if (wake) arrived_.notify_one();
}

void CompletionQueue::ForgetMark() {
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --expected_;
    wake = IsWorthTaking(few_);
  }
  if (wake) arrived_.notify_one();
}

std::vector<Completion> CompletionQueue::TakeAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  return Take();
}

std::vector<Completion> CompletionQueue::TakeIfFewLeft(int64_t few) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!IsWorthTaking(few)) return {};
  return Take();
}

void CompletionQueue::WaitUntil(int64_t deadline, int64_t few) {
  const Clock::time_point when{std::chrono::nanoseconds(deadline)};
  std::unique_lock<std::mutex> lock(mutex_);
  few_ = few;
  arrived_.wait_until(lock, when, [this] { return IsWorthTaking(few_); });
}

bool CompletionQueue::IsWorthTaking(int64_t few) const {
  return !completions_.empty() && (!only_marks_ || expected_ <= few);
}

std::vector<Completion> CompletionQueue::Take() {
  std::vector<Completion> taken;
  std::swap(taken, completions_);
  only_marks_ = true;
  return taken;
}

}  // namespace jturnip
