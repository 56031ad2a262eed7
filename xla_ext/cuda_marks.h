// Marks on a CUDA stream, through the driver API found at run time: building
// needs no CUDA.

#ifndef JTURNIP_XLA_EXT_CUDA_MARKS_H_
#define JTURNIP_XLA_EXT_CUDA_MARKS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace jturnip {

// The entry points of libcuda.so.1 that marks need, with the driver's own types
// spelled out (CUresult is an int enum; CUstream, CUcontext and CUevent are
// pointers to opaque structs; CUdeviceptr is an unsigned 64-bit integer). Tests
// fill it with functions of their own.
struct CudaDriver {
  using Result = int;
  using Stream = void*;
  using Context = void*;
  using Event = void*;
  using DevicePtr =
      unsigned long long;  // NOLINT(runtime/int): as cuda.h has it

  Result (*stream_get_ctx)(Stream, Context*);
  Result (*ctx_push_current)(Context);
  Result (*ctx_pop_current)(Context*);
  Result (*mem_host_alloc)(void**, size_t, unsigned int flags);
  Result (*memcpy_dtoh_async)(void*, DevicePtr, size_t, Stream);
  Result (*memcpy_dtod_async)(DevicePtr, DevicePtr, size_t, Stream);
  Result (*memset_d32_async)(DevicePtr, unsigned int, size_t, Stream);
  Result (*event_create)(Event*, unsigned int flags);
  Result (*event_record)(Event, Stream);
  Result (*event_synchronize)(Event);
  Result (*get_error_name)(Result, const char**);
};

// Opens libcuda.so.1 once. Null, with the reason in `error`, if that fails.
const CudaDriver* FindCudaDriver(std::string* error);

// Enqueues on `stream`: write the int32 at `slot` to the one at `result` (both
// on the device), and fire that mark when everything before it on the stream is
// done. A thread of its own waits for an event and fires, so nothing on the
// stream waits for the host. Never waits for the device, except that a call may
// allocate a little pinned memory.
//
// `known` is the number at `slot`, where the caller knows it. Otherwise it is
// copied to the host: then the stream waits for an engine that copies, which
// may have much else to do.
//
// Returns what failed, or the empty string.
std::string EnqueueMark(const CudaDriver& driver, CudaDriver::Stream stream,
                        std::optional<int32_t> known, const int32_t* slot,
                        int32_t* result);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_CUDA_MARKS_H_
