#include "cuda_marks.h"

#include <dlfcn.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "mark_slots.h"

namespace jturnip {

namespace {

using DevicePtr = CudaDriver::DevicePtr;

// One pinned place for a slot number on its way from the device.
struct alignas(8) Cell {
  int32_t slot;
};

// The cells in no one's use. The lock is never held during a CUDA call, which
// may wait for the device.
class CellPool {
 public:
  static CellPool& Global() {
    static CellPool* const pool = new CellPool;
    return *pool;
  }

  // Null when the pool is empty.
  Cell* Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cells_.empty()) return nullptr;
    Cell* cell = cells_.back();
    cells_.pop_back();
    return cell;
  }

  void Give(Cell* cell) {
    std::lock_guard<std::mutex> lock(mutex_);
    cells_.push_back(cell);
  }

  // Adds `block`, one page of pinned memory, which is never freed.
  void Add(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    Cell* const cells = static_cast<Cell*>(block);
    cells_.reserve(cells_.size() + kPageBytes / sizeof(Cell));
    for (size_t i = 0; i < kPageBytes / sizeof(Cell); ++i)
      cells_.push_back(cells + i);
  }

  static constexpr size_t kPageBytes = 4096;

 private:
  std::mutex mutex_;
  std::vector<Cell*> cells_;
};

std::string Failure(const CudaDriver& driver, const char* call,
                    CudaDriver::Result result) {
  const char* name = nullptr;
  if (driver.get_error_name(result, &name) != 0 || name == nullptr) {
    name = "unknown error";
  }
  return std::string(call) + " failed: " + name + " (" +
         std::to_string(result) + ")";
}

// Makes the stream's context current, and gives the thread back its own at the
// end.
class ScopedContext {
 public:
  ScopedContext(const CudaDriver& driver, CudaDriver::Stream stream)
      : driver_(driver) {
    CudaDriver::Result result = driver.stream_get_ctx(stream, &context_);
    if (result != 0) {
      error_ = Failure(driver, "cuStreamGetCtx", result);
      return;
    }
    result = driver.ctx_push_current(context_);
    if (result != 0) {
      error_ = Failure(driver, "cuCtxPushCurrent_v2", result);
      return;
    }
    pushed_ = true;
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  ~ScopedContext() {
    CudaDriver::Context ignored;
    if (pushed_) driver_.ctx_pop_current(&ignored);
  }

  const std::string& error() const { return error_; }
  CudaDriver::Context context() const { return context_; }

 private:
  const CudaDriver& driver_;
  CudaDriver::Context context_ = nullptr;
  bool pushed_ = false;
  std::string error_;
};

Cell* TakeCell(const CudaDriver& driver, std::string* error) {
  constexpr unsigned int kPortable =
      1;  // CU_MEMHOSTALLOC_PORTABLE: for every context
  CellPool& pool = CellPool::Global();
  while (true) {
    if (Cell* cell = pool.Take()) return cell;
    void* block = nullptr;
    const CudaDriver::Result result =
        driver.mem_host_alloc(&block, CellPool::kPageBytes, kPortable);
    if (result != 0) {
      *error = Failure(driver, "cuMemHostAlloc", result);
      return nullptr;
    }
    pool.Add(block);
  }
}

// A mark on its way: fires `slot`, or what `cell` holds if there is one.
struct Coming {
  CudaDriver::Event event;
  int32_t slot;
  Cell* cell;
};

// Waits for the marks of one context, in the order they were enqueued in, which
// is that of its compute stream. Its thread sleeps in the driver.
class Watcher {
 public:
  // The one of a context; never destroyed, as its thread never ends.
  static Watcher& Of(const CudaDriver& driver, CudaDriver::Context context) {
    static std::mutex* const mutex = new std::mutex;
    static auto* const watchers = new std::map<CudaDriver::Context, Watcher*>;
    std::lock_guard<std::mutex> lock(*mutex);
    Watcher*& watcher = (*watchers)[context];
    if (watcher == nullptr) {
      watcher = new Watcher(driver);
      std::thread(&Watcher::Run, watcher, context).detach();
    }
    return *watcher;
  }

  // An event of the context, which must be current. Null, with the reason in
  // `error`, if there is none.
  CudaDriver::Event TakeEvent(std::string* error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!events_.empty()) {
        CudaDriver::Event event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    constexpr unsigned int kBlockingSync = 1, kDisableTiming = 2;
    CudaDriver::Event event = nullptr;
    const CudaDriver::Result result =
        driver_.event_create(&event, kBlockingSync | kDisableTiming);
    if (result != 0) *error = Failure(driver_, "cuEventCreate", result);
    return result == 0 ? event : nullptr;
  }

  void GiveEvent(CudaDriver::Event event) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(event);
  }

  void Watch(const Coming& coming) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      coming_.push_back(coming);
    }
    arrived_.notify_one();
  }

 private:
  explicit Watcher(const CudaDriver& driver) : driver_(driver) {}

  void Run(CudaDriver::Context context) {
    driver_.ctx_push_current(context);
    while (true) {
      Coming next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        arrived_.wait(lock, [this] { return !coming_.empty(); });
        next = coming_.front();
        coming_.pop_front();
      }
      // What failed on the device fires no mark: JAX says what it was. A cell
      // may still be written to then, and nothing says when.
      if (driver_.event_synchronize(next.event) != 0) continue;
      if (next.cell != nullptr) {
        next.slot = next.cell->slot;
        CellPool::Global().Give(next.cell);
      }
      GiveEvent(next.event);
      MarkSlots::Global().Fire(next.slot);
    }
  }

  const CudaDriver& driver_;
  std::mutex mutex_;  // never held during a CUDA call
  std::condition_variable arrived_;
  std::deque<Coming> coming_;
  std::vector<CudaDriver::Event> events_;  // in no one's use
};

// Enqueues what leaves the slot's number at `result`, and on the host in
// `coming`.
std::string EnqueueNumber(const CudaDriver& driver, CudaDriver::Stream stream,
                          std::optional<int32_t> known, DevicePtr source,
                          DevicePtr target, Coming* coming) {
  if (known) {
    coming->slot = *known;
    const CudaDriver::Result result = driver.memset_d32_async(
        target, static_cast<uint32_t>(*known), 1, stream);
    return result == 0 ? "" : Failure(driver, "cuMemsetD32Async", result);
  }
  CudaDriver::Result result =
      driver.memcpy_dtod_async(target, source, sizeof(int32_t), stream);
  if (result != 0) return Failure(driver, "cuMemcpyDtoDAsync_v2", result);
  std::string error;
  Cell* const cell = TakeCell(driver, &error);
  if (cell == nullptr) return error;
  result =
      driver.memcpy_dtoh_async(&cell->slot, source, sizeof(int32_t), stream);
  if (result != 0) {
    CellPool::Global().Give(cell);
    return Failure(driver, "cuMemcpyDtoHAsync_v2", result);
  }
  coming->cell = cell;
  return "";
}

}  // namespace

const CudaDriver* FindCudaDriver(std::string* error) {
  struct Found {
    CudaDriver driver{};
    std::string error;
  };
  static const Found* const found = [] {
    Found* const f = new Found;
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      f->error = std::string("the CUDA driver cannot be opened: ") + dlerror();
      return f;
    }
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(
          dlsym(library, name));
      if (function == nullptr && f->error.empty()) {
        f->error = std::string("the CUDA driver has no ") + name;
      }
    };
    find(f->driver.stream_get_ctx, "cuStreamGetCtx");
    find(f->driver.ctx_push_current, "cuCtxPushCurrent_v2");
    find(f->driver.ctx_pop_current, "cuCtxPopCurrent_v2");
    find(f->driver.mem_host_alloc, "cuMemHostAlloc");
    find(f->driver.memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
    find(f->driver.memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
    find(f->driver.memset_d32_async, "cuMemsetD32Async");
    find(f->driver.event_create, "cuEventCreate");
    find(f->driver.event_record, "cuEventRecord");
    find(f->driver.event_synchronize, "cuEventSynchronize");
    find(f->driver.get_error_name, "cuGetErrorName");
    return f;
  }();
  *error = found->error;
  return found->error.empty() ? &found->driver : nullptr;
}

std::string EnqueueMark(const CudaDriver& driver, CudaDriver::Stream stream,
                        std::optional<int32_t> known, const int32_t* slot,
                        int32_t* result) {
  const ScopedContext context(driver, stream);
  if (!context.error().empty()) return context.error();

  std::string error;
  Watcher& watcher = Watcher::Of(driver, context.context());
  Coming coming = {watcher.TakeEvent(&error), 0, nullptr};
  if (coming.event == nullptr) return error;
  error = EnqueueNumber(driver, stream, known, reinterpret_cast<uintptr_t>(slot),
                        reinterpret_cast<uintptr_t>(result), &coming);
  if (error.empty()) {
    const CudaDriver::Result code = driver.event_record(coming.event, stream);
    if (code == 0) {
      watcher.Watch(coming);
      return "";
    }
    // A cell may still be written to, and nothing says when: it is not used
    // again.
    error = Failure(driver, "cuEventRecord", code);
  }
  watcher.GiveEvent(coming.event);
  return error;
}

}  // namespace jturnip
