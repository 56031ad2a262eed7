// A queue of completions: any thread pushes an id, one reader sleeps until the
// first that it wants to hear of at once.

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

  // A mark will push here; it has, or it never will.
  void ExpectMark();
  void PushMark(int64_t id);
  void ForgetMark();

  // Takes everything queued, oldest first; times never decrease. Never sleeps.
  std::vector<Completion> TakeAll();

  // The same, but nothing where only marks have pushed and more than `few` of
  // them are still expected.
  std::vector<Completion> TakeIfFewLeft(int64_t few);

  // Sleeps until TakeIfFewLeft would take something or `deadline` (as
  // NowNanoseconds() counts) passes.
  void WaitUntil(int64_t deadline, int64_t few);

 private:
  bool IsWorthTaking(int64_t few) const;
  std::vector<Completion> Take();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Completion> completions_;  // in the order pushed
  bool only_marks_ = true;  // among them; true where there are none
  int64_t expected_ = 0;    // marks that are still to push
  int64_t few_ = 0;         // of the reader that sleeps
};

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_COMPLETION_QUEUE_H_
