// Marks on a CUDA stream against a driver made of plain functions: needs no
// GPU.
//
// The pretended stream runs nothing until told to, so that order and ownership
// can be seen; what waits for an event of it sleeps until then.

#include "cuda_marks.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "completion_queue.h"
#include "mark_slots.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace jturnip {
namespace {

using Driver = CudaDriver;

std::vector<std::function<void()>> stream;  // what was enqueued and has not run
// The stack of this thread's current contexts.
thread_local std::vector<void*> contexts;
thread_local std::string failing;  // the call that is to fail
int allocations = 0;
int copies_to_host = 0;

// How often each event was recorded, and how often the stream has come to one.
struct Event {
  int recorded = 0;
  int reached = 0;
  bool fails = false;
};
std::mutex mutex;  // of all events
std::condition_variable reached;
bool fails_on_device = false;  // what is recorded from now on
int events = 0;

int Result(const char* call) { return failing == call ? 700 : 0; }

int StreamGetCtx(Driver::Stream s, Driver::Context* context) {
  *context = s;  // each stream is its own context
  return Result("cuStreamGetCtx");
}

int CtxPushCurrent(Driver::Context context) {
  contexts.push_back(context);
  return Result("cuCtxPushCurrent_v2");
}

int CtxPopCurrent(Driver::Context*) {
  contexts.pop_back();
  return Result("cuCtxPopCurrent_v2");
}

int MemHostAlloc(void** block, size_t bytes, unsigned int) {
  ++allocations;
  *block = std::malloc(bytes);
  return Result("cuMemHostAlloc");
}

int MemcpyDtoH(void* target, Driver::DevicePtr source, size_t bytes,
               Driver::Stream s) {
  CHECK(!contexts.empty() && contexts.back() == s);
  const void* from = reinterpret_cast<void*>(source);
  ++copies_to_host;
  stream.push_back([=] { std::memcpy(target, from, bytes); });
  return Result("cuMemcpyDtoHAsync_v2");
}

int MemcpyDtoD(Driver::DevicePtr target, Driver::DevicePtr source, size_t bytes,
               Driver::Stream s) {
  CHECK(!contexts.empty() && contexts.back() == s);
  void* const to = reinterpret_cast<void*>(target);
  const void* from = reinterpret_cast<void*>(source);
  stream.push_back([=] { std::memcpy(to, from, bytes); });
  return Result("cuMemcpyDtoDAsync_v2");
}

int MemsetD32(Driver::DevicePtr target, unsigned int value, size_t count,
              Driver::Stream s) {
  CHECK(!contexts.empty() && contexts.back() == s && count == 1);
  void* const to = reinterpret_cast<void*>(target);
  stream.push_back([=] { std::memcpy(to, &value, sizeof(value)); });
  return Result("cuMemsetD32Async");
}

int EventCreate(Driver::Event* event, unsigned int) {
  CHECK(!contexts.empty());
  ++events;
  *event = new Event;
  return Result("cuEventCreate");
}

int EventRecord(Driver::Event event, Driver::Stream s) {
  CHECK(!contexts.empty() && contexts.back() == s);
  const int result = Result("cuEventRecord");
  if (result != 0) return result;
  Event* const e = static_cast<Event*>(event);
  std::lock_guard<std::mutex> lock(mutex);
  ++e->recorded;
  e->fails = fails_on_device;
  stream.push_back([e] {
    std::lock_guard<std::mutex> lock(mutex);
    ++e->reached;
    reached.notify_all();
  });
  return 0;
}

int EventSynchronize(Driver::Event event) {
  CHECK(contexts.size() == 1);  // the watcher's own
  const Event* const e = static_cast<Event*>(event);
  std::unique_lock<std::mutex> lock(mutex);
  reached.wait(lock, [e] { return e->reached == e->recorded; });
  return e->fails ? 700 : 0;
}

int GetErrorName(Driver::Result, const char** name) {
  *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
  return 0;
}

const Driver kDriver = {StreamGetCtx, CtxPushCurrent, CtxPopCurrent,
                        MemHostAlloc, MemcpyDtoH,     MemcpyDtoD,
                        MemsetD32,    EventCreate,    EventRecord,
                        EventSynchronize, GetErrorName};

void RunStream() {
  for (const std::function<void()>& work : stream) work();
  stream.clear();
}

// As many as are expected; waits for them.
std::vector<Completion> Taken(CompletionQueue& queue, size_t count) {
  std::vector<Completion> taken;
  while (taken.size() < count) {
    queue.WaitUntil(NowNanoseconds() + 10'000'000'000, 1 << 20);
    const std::vector<Completion> some = queue.TakeAll();
    CHECK(!some.empty());
    taken.insert(taken.end(), some.begin(), some.end());
  }
  return taken;
}

int the_stream;

std::string Enqueue(std::optional<int32_t> known, const int32_t* slot,
                    int32_t* result) {
  const std::string error =
      EnqueueMark(kDriver, &the_stream, known, slot, result);
  CHECK(contexts.empty() || failing == "cuCtxPushCurrent_v2");
  contexts.clear();
  return error;
}

void TestMarkFiresInStreamOrder() {
  CompletionQueue queue;
  MarkSlots& slots = MarkSlots::Global();
  const int32_t slot = *slots.Open(&queue);
  CHECK(slots.Arm(&queue, slot, 42));
  int32_t on_device = -1, result = -1;
  stream.push_back([&] { on_device = slot; });  // computed late, on the stream
  CHECK(Enqueue(std::nullopt, &on_device, &result).empty());
  CHECK(queue.TakeAll().empty() && result == -1);
  RunStream();
  const std::vector<Completion> completions = Taken(queue, 1);
  CHECK(completions.size() == 1 && completions[0].id == 42 && result == slot);
  slots.CloseAll(&queue);
}

void TestAKnownSlotIsNotCopiedToTheHost() {
  CompletionQueue queue;
  MarkSlots& slots = MarkSlots::Global();
  const int32_t slot = *slots.Open(&queue);
  CHECK(slots.Arm(&queue, slot, 43) && !MarkSlots::TakeCalledNext());
  CHECK(slots.Arm(&queue, slot, 43, /*is_called_next=*/true));
  std::optional<int32_t> elsewhere = 1;
  std::thread([&] { elsewhere = MarkSlots::TakeCalledNext(); }).join();
  CHECK(!elsewhere);
  const std::optional<int32_t> known = MarkSlots::TakeCalledNext();
  CHECK(known && *known == slot && !MarkSlots::TakeCalledNext());
  const int before = copies_to_host;
  int32_t result = -1;
  CHECK(Enqueue(known, nullptr, &result).empty());
  CHECK(queue.TakeAll().empty() && result == -1);
  RunStream();
  CHECK(Taken(queue, 1)[0].id == 43 && result == slot);
  CHECK(copies_to_host == before);
  slots.CloseAll(&queue);
}

void TestManyMarksInFlightAndCellsAreUsedAgain() {
  constexpr int kMarks = 1500;  // more than one page of cells
  CompletionQueue queue;
  MarkSlots& slots = MarkSlots::Global();
  std::vector<int32_t> on_device(kMarks), results(kMarks, -1);
  int after_first_round = 0, events_then = 0;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kMarks; ++i) {
      on_device[i] = *slots.Open(&queue);
      CHECK(slots.Arm(&queue, on_device[i], i));
      CHECK(Enqueue(std::nullopt, &on_device[i], &results[i]).empty());
    }
    RunStream();
    const std::vector<Completion> completions = Taken(queue, kMarks);
    CHECK(completions.size() == kMarks);
    for (int i = 0; i < kMarks; ++i) CHECK(completions[i].id == i);
    CHECK(results == on_device);
    slots.CloseAll(&queue);
    if (round == 0) after_first_round = allocations, events_then = events;
  }
  CHECK(allocations == after_first_round && events == events_then);
}

void TestWhatFailsOnTheDeviceFiresNoMark() {
  CompletionQueue queue;
  MarkSlots& slots = MarkSlots::Global();
  const int32_t failed = *slots.Open(&queue), good = *slots.Open(&queue);
  int32_t result = -1;
  CHECK(slots.Arm(&queue, failed, 44) && slots.Arm(&queue, good, 45));
  for (const int32_t slot : {failed, good}) {
    fails_on_device = slot == failed;
    CHECK(Enqueue(slot, nullptr, &result).empty());
  }
  RunStream();
  CHECK(Taken(queue, 1)[0].id == 45);
  slots.CloseAll(&queue);
}

void TestFailuresNameTheCall() {
  for (const char* call :
       {"cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuMemcpyDtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2", "cuMemsetD32Async", "cuEventRecord"}) {
    failing = call;
    int32_t slot = 0, result = 0;
    std::optional<int32_t> known;
    if (failing == "cuMemsetD32Async") known = slot;
    const std::string error = Enqueue(known, &slot, &result);
    CHECK(error ==
          std::string(call) + " failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    stream.clear();
  }
  failing.clear();
}

void TestFailedAllocationIsReported() {
  for (const char* call : {"cuEventCreate", "cuMemHostAlloc"}) {
    failing = call;
    int32_t slot = 0, result = 0;
    const std::string error = Enqueue(
        std::nullopt, &slot, &result);  // first of all: the pools are empty
    CHECK(error ==
          std::string(call) + " failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    stream.clear();
  }
  failing.clear();
}

}  // namespace
}  // namespace jturnip

int main() {
  jturnip::TestFailedAllocationIsReported();
  jturnip::TestMarkFiresInStreamOrder();
  jturnip::TestAKnownSlotIsNotCopiedToTheHost();
  jturnip::TestManyMarksInFlightAndCellsAreUsedAgain();
  jturnip::TestWhatFailsOnTheDeviceFiresNoMark();
  jturnip::TestFailuresNameTheCall();
  return 0;
}
