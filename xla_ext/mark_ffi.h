// The XLA custom call "jturnip_mark", for CPU and for CUDA.

#ifndef JTURNIP_XLA_EXT_MARK_FFI_H_
#define JTURNIP_XLA_EXT_MARK_FFI_H_

#include "xla/ffi/api/ffi.h"

// Operands: a buffer of any type, the slot (a scalar s32), then any more
// buffers. One result: a scalar s32 that gets the slot's number. The mark fires
// when its operands are ready. It declares no effect; it lives because its
// result is an output of the executable.
extern "C" XLA_FFI_Error* JturnipMarkCpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JturnipMarkCuda(XLA_FFI_CallFrame* call_frame);

#endif  // JTURNIP_XLA_EXT_MARK_FFI_H_
