// The table that leads a mark inside an executable to the queue that waits for
// it.

#ifndef JTURNIP_XLA_EXT_MARK_SLOTS_H_
#define JTURNIP_XLA_EXT_MARK_SLOTS_H_

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "completion_queue.h"

namespace jturnip {

// A mark carries only a slot number: a place in the table, and how often that
// place was closed before (19 bits). So a mark that comes late, after its slot
// was closed and the place given to another queue, is recognised and ignored.
//
// Thread-safe. A queue must call CloseAll before it is destroyed; once Close or
// CloseAll has returned, no mark touches the queue on behalf of the closed
// slots.
class MarkSlots {
 public:
  static constexpr int32_t kCapacity = 4096;  // slots open at the same time

  // The one table of the process. Never destroyed: XLA's threads may outlive
  // main().
  static MarkSlots& Global();

  MarkSlots();

  // Nothing when kCapacity slots are open.
  std::optional<int32_t> Open(CompletionQueue* queue);

  // The next mark on `slot` pushes `id`. False if `queue` has no such open
  // slot. With `is_called_next` it is the mark of the executable that this
  // thread dispatches next.
  bool Arm(CompletionQueue* queue, int32_t slot, int64_t id,
           bool is_called_next = false);

  // The slot that this thread armed for what it dispatches next, once: then the
  // mark need not ask the device. Nothing in any other thread.
  static std::optional<int32_t> TakeCalledNext();

  // False if `queue` has no such open slot.
  bool Close(CompletionQueue* queue, int32_t slot);

  void CloseAll(CompletionQueue* queue);

  // What a mark does: pushes the id `slot` is armed with and disarms it.
  // Anything else, such as a slot that is closed, not armed or never existed,
  // is ignored.
  void Fire(int32_t slot);

 private:
  struct Entry {
    int32_t number = 0;  // number % kCapacity is its place in the table
    CompletionQueue* queue = nullptr;  // null when closed
    bool armed = false;                // false when closed
    int64_t id = 0;                    // meaningful when armed
  };

  Entry& At(int32_t slot) { return entries_[slot & (kCapacity - 1)]; }
  bool IsOpen(const Entry& entry, CompletionQueue* queue, int32_t slot) const;
  void CloseEntry(Entry& entry);

  std::mutex mutex_;  // taken before a queue's own, never after
  std::array<Entry, kCapacity> entries_;
  std::deque<int32_t> free_;  // numbers of closed entries, longest closed first
};

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_MARK_SLOTS_H_
