#include "mark_slots.h"

#include <utility>

namespace jturnip {

static_assert((MarkSlots::kCapacity & (MarkSlots::kCapacity - 1)) == 0,
              "a slot's place is its number's low bits");

namespace {
thread_local std::optional<int32_t> called_next;
}

MarkSlots& MarkSlots::Global() {
  static MarkSlots* const slots = new MarkSlots;
  return *slots;
}

MarkSlots::MarkSlots() {
  for (int32_t i = 0; i < kCapacity; ++i) {
    entries_[i].number = i;
    free_.push_back(i);
  }
}

std::optional<int32_t> MarkSlots::Open(CompletionQueue* queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return std::nullopt;
  const int32_t slot = free_.front();
  free_.pop_front();
  At(slot).queue = queue;
  return slot;
}

bool MarkSlots::Arm(CompletionQueue* queue, int32_t slot, int64_t id,
                    bool is_called_next) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = At(slot);
  if (!IsOpen(entry, queue, slot)) return false;
  if (!entry.armed) queue->ExpectMark();
  entry.armed = true;
  entry.id = id;
  if (is_called_next) called_next = slot;
  return true;
}

std::optional<int32_t> MarkSlots::TakeCalledNext() {
  return std::exchange(called_next, std::nullopt);
}

bool MarkSlots::Close(CompletionQueue* queue, int32_t slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = At(slot);
  if (!IsOpen(entry, queue, slot)) return false;
  CloseEntry(entry);
  return true;
}

void MarkSlots::CloseAll(CompletionQueue* queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Entry& entry : entries_) {
    if (entry.queue == queue) CloseEntry(entry);
  }
}

void MarkSlots::Fire(int32_t slot) {
  // Pushes under the lock: that is what lets Close promise that nothing comes
  // after it.
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = At(slot);
  if (!entry.armed || entry.number != slot) return;
  entry.armed = false;
  entry.queue->PushMark(entry.id);
}

bool MarkSlots::IsOpen(const Entry& entry, CompletionQueue* queue,
                       int32_t slot) const {
  return entry.queue == queue && entry.number == slot;
}

void MarkSlots::CloseEntry(Entry& entry) {
  if (entry.armed) entry.queue->ForgetMark();
  entry.queue = nullptr;
  entry.armed = false;
  // The next number with the same place. Wraps to the place itself, never below
  // zero.
  entry.number = static_cast<int32_t>(
      (static_cast<uint32_t>(entry.number) + kCapacity) & 0x7fffffffu);
  free_.push_back(entry.number);
}

}  // namespace jturnip
