#include "cuda_marks.h"

#include <dlfcn.h>

#include <mutex>
#include <type_traits>
#include <vector>

#include "mark_slots.h"

namespace jturnip {

namespace {

using DevicePtr = CudaDriver::DevicePtr;

// One pinned place for a slot number on its way from the device to the host
// function.
struct alignas(8) Cell {
  int32_t slot;
};

// The cells in no one's use. The lock is never held during a CUDA call: the
// host function takes it too, and an allocation may wait for the stream that
// runs the host function.
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
    CudaDriver::Context context = nullptr;
    CudaDriver::Result result = driver.stream_get_ctx(stream, &context);
    if (result != 0) {
      error_ = Failure(driver, "cuStreamGetCtx", result);
      return;
    }
    result = driver.ctx_push_current(context);
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

 private:
  const CudaDriver& driver_;
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

// Runs on a thread of the driver, in the order of the stream. Must not call
// CUDA.
void FireCell(void* data) {
  Cell* const cell = static_cast<Cell*>(data);
  const int32_t slot = cell->slot;
  CellPool::Global().Give(cell);
  MarkSlots::Global().Fire(slot);
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
    find(f->driver.launch_host_func, "cuLaunchHostFunc");
    find(f->driver.get_error_name, "cuGetErrorName");
    return f;
  }();
  *error = found->error;
  return found->error.empty() ? &found->driver : nullptr;
}

std::string EnqueueMark(const CudaDriver& driver, CudaDriver::Stream stream,
                        const int32_t* slot, int32_t* result) {
  const ScopedContext context(driver, stream);
  if (!context.error().empty()) return context.error();

  const DevicePtr source = reinterpret_cast<uintptr_t>(slot);
  const DevicePtr target = reinterpret_cast<uintptr_t>(result);
  CudaDriver::Result code =
      driver.memcpy_dtod_async(target, source, sizeof(int32_t), stream);
  if (code != 0) return Failure(driver, "cuMemcpyDtoDAsync_v2", code);

  std::string error;
  Cell* const cell = TakeCell(driver, &error);
  if (cell == nullptr) return error;
  code = driver.memcpy_dtoh_async(&cell->slot, source, sizeof(int32_t), stream);
  if (code != 0) {
    CellPool::Global().Give(cell);
    return Failure(driver, "cuMemcpyDtoHAsync_v2", code);
  }
  code = driver.launch_host_func(stream, &FireCell, cell);
  // The copy above may still write the cell, and nothing says when: it is not
  // used again.
  if (code != 0) return Failure(driver, "cuLaunchHostFunc", code);
  return "";
}

}  // namespace jturnip
