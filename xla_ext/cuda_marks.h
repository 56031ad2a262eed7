// Marks on a CUDA stream, through the driver API found at run time: building
// needs no CUDA.

#ifndef JTURNIP_XLA_EXT_CUDA_MARKS_H_
#define JTURNIP_XLA_EXT_CUDA_MARKS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace jturnip {

// The entry points of libcuda.so.1 that marks need, with the driver's own types
// spelled out (CUresult is an int enum; CUstream and CUcontext are pointers to
// opaque structs; CUdeviceptr is an unsigned 64-bit integer). Tests fill it
// with functions of their own.
struct CudaDriver {
  using Result = int;
  using Stream = void*;
  using Context = void*;
  using DevicePtr =
      unsigned long long;  // NOLINT(runtime/int): as cuda.h has it

  Result (*stream_get_ctx)(Stream, Context*);
  Result (*ctx_push_current)(Context);
  Result (*ctx_pop_current)(Context*);
  Result (*mem_host_alloc)(void**, size_t, unsigned int flags);
  Result (*memcpy_dtoh_async)(void*, DevicePtr, size_t, Stream);
  Result (*memcpy_dtod_async)(DevicePtr, DevicePtr, size_t, Stream);
  Result (*launch_host_func)(Stream, void (*)(void*), void*);
  Result (*get_error_name)(Result, const char**);
};

// Opens libcuda.so.1 once. Null, with the reason in `error`, if that fails.
const CudaDriver* FindCudaDriver(std::string* error);

// Enqueues on `stream`: copy the int32 at `slot` to the one at `result` (both
// on the device), and fire that mark when everything before it on the stream is
// done. Never waits for the device, except that the first call allocates a
// little pinned memory.
//
// Returns what failed, or the empty string.
std::string EnqueueMark(const CudaDriver& driver, CudaDriver::Stream stream,
                        const int32_t* slot, int32_t* result);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_CUDA_MARKS_H_
