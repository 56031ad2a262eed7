// Marks on a CUDA stream against a driver made of plain functions: needs no
// GPU.
//
// The pretended stream runs nothing until told to, so that order and ownership
// can be seen.

#include "cuda_marks.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
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
std::vector<void*> contexts;                // the stack of current contexts
std::string failing;                        // the call that is to fail
int allocations = 0;
bool in_host_function = false;

int Result(const char* call) {
  CHECK(!in_host_function);  // a host function must not call CUDA
  return failing == call ? 700 : 0;
}

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

int LaunchHostFunc(Driver::Stream, void (*function)(void*), void* data) {
  const int result = Result("cuLaunchHostFunc");
  if (result != 0) return result;
  stream.push_back([=] {
    in_host_function = true;
    function(data);
    in_host_function = false;
  });
  return 0;
}

int GetErrorName(Driver::Result, const char** name) {
  *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
  return 0;
}

const Driver kDriver = {StreamGetCtx,   CtxPushCurrent, CtxPopCurrent,
                        MemHostAlloc,   MemcpyDtoH,     MemcpyDtoD,
                        LaunchHostFunc, GetErrorName};

void RunStream() {
  for (const std::function<void()>& work : stream) work();
  stream.clear();
}

int the_stream;

std::string Enqueue(const int32_t* slot, int32_t* result) {
  const std::string error = EnqueueMark(kDriver, &the_stream, slot, result);
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
  CHECK(Enqueue(&on_device, &result).empty());
  CHECK(queue.TakeAll().empty() && result == -1);
  RunStream();
  const std::vector<Completion> completions = queue.TakeAll();
  CHECK(completions.size() == 1 && completions[0].id == 42 && result == slot);
  slots.CloseAll(&queue);
}

void TestManyMarksInFlightAndCellsAreUsedAgain() {
  constexpr int kMarks = 1500;  // more than one page of cells
  CompletionQueue queue;
  MarkSlots& slots = MarkSlots::Global();
  std::vector<int32_t> on_device(kMarks), results(kMarks, -1);
  int after_first_round = 0;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kMarks; ++i) {
      on_device[i] = *slots.Open(&queue);
      CHECK(slots.Arm(&queue, on_device[i], i));
      CHECK(Enqueue(&on_device[i], &results[i]).empty());
    }
    RunStream();
    const std::vector<Completion> completions = queue.TakeAll();
    CHECK(completions.size() == kMarks);
    for (int i = 0; i < kMarks; ++i) CHECK(completions[i].id == i);
    CHECK(results == on_device);
    slots.CloseAll(&queue);
    if (round == 0) after_first_round = allocations;
  }
  CHECK(allocations == after_first_round);
}

void TestFailuresNameTheCall() {
  for (const char* call :
       {"cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuMemcpyDtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2", "cuLaunchHostFunc"}) {
    failing = call;
    int32_t slot = 0, result = 0;
    const std::string error = Enqueue(&slot, &result);
    CHECK(error ==
          std::string(call) + " failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    stream.clear();
  }
  failing.clear();
}

void TestFailedAllocationIsReported() {
  failing = "cuMemHostAlloc";
  int32_t slot = 0, result = 0;
  const std::string error =
      Enqueue(&slot, &result);  // first of all: the pool is empty
  CHECK(error == "cuMemHostAlloc failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  stream.clear();
  failing.clear();
}

}  // namespace
}  // namespace jturnip

int main() {
  jturnip::TestFailedAllocationIsReported();
  jturnip::TestMarkFiresInStreamOrder();
  jturnip::TestManyMarksInFlightAndCellsAreUsedAgain();
  jturnip::TestFailuresNameTheCall();
  return 0;
}
