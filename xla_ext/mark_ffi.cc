#include "mark_ffi.h"

#include <string>

#include "cuda_marks.h"
#include "mark_slots.h"

namespace ffi = xla::ffi;

namespace jturnip {
namespace {

using Scalar = ffi::BufferR0<ffi::S32>;

// The remaining results are the arrays waited for, in their own memory.
ffi::Error MarkCpu(ffi::AnyBuffer, Scalar slot, ffi::RemainingArgs,
                   ffi::Result<Scalar> result, ffi::RemainingRets) {
  const int32_t number = *slot.typed_data();
  *result->typed_data() = number;
  MarkSlots::Global().Fire(number);
  return ffi::Error::Success();
}

ffi::Error MarkCuda(void* stream, ffi::AnyBuffer, Scalar slot,
                    ffi::RemainingArgs, ffi::Result<Scalar> result,
                    ffi::RemainingRets) {
  std::string error;
  const CudaDriver* const driver = FindCudaDriver(&error);
  if (driver != nullptr) {
    error = EnqueueMark(*driver, stream, MarkSlots::TakeCalledNext(),
                        slot.typed_data(), result->typed_data());
  }
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jturnip_mark: " + error);
}

}  // namespace
}  // namespace jturnip

XLA_FFI_DEFINE_HANDLER_SYMBOL(JturnipMarkCpu, jturnip::MarkCpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jturnip::Scalar>()
                                  .RemainingArgs()
                                  .Ret<jturnip::Scalar>()
                                  .RemainingRets());

// Without the command-buffer trait: what is recorded cannot be replayed with new
// slots.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JturnipMarkCuda, jturnip::MarkCuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jturnip::Scalar>()
                                  .RemainingArgs()
                                  .Ret<jturnip::Scalar>()
                                  .RemainingRets());
