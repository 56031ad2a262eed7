// The Python module jturnip.native._native: thin bindings and no logic of its
// own.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "completion_queue.h"
#include "mark_ffi.h"
#include "mark_slots.h"
#include "plan_bindings.h"

namespace nb = nanobind;

namespace jturnip {
namespace {

// Sleeping is cut into pieces of this length, so that Ctrl-C is heard.
constexpr int64_t kSignalCheckNanoseconds = 100'000'000;

class PyQueue {
 public:
  PyQueue() = default;
  PyQueue(const PyQueue&) = delete;
  PyQueue& operator=(const PyQueue&) = delete;
  ~PyQueue() { MarkSlots::Global().CloseAll(&queue_); }

  void Push(int64_t id) { queue_.Push(id); }

  nb::list Drain(double timeout_seconds, int64_t few) {
    if (!(timeout_seconds >= 0)) {
      throw nb::value_error("timeout_seconds must be zero or more");
    }
    // Whoever looks for completions has dispatched what was to come next.
    MarkSlots::TakeCalledNext();
    std::vector<Completion> completions = timeout_seconds > 0
                                              ? queue_.TakeIfFewLeft(few)
                                              : queue_.TakeAll();
    if (completions.empty() && timeout_seconds > 0)
      completions = Wait(timeout_seconds, few);
    nb::list pairs;
    for (const Completion& completion : completions) {
      const double seconds = static_cast<double>(completion.nanoseconds) * 1e-9;
      pairs.append(nb::make_tuple(completion.id, seconds));
    }
    return pairs;
  }

  int32_t OpenSlot() {
    const std::optional<int32_t> slot = MarkSlots::Global().Open(&queue_);
    if (slot) return *slot;
    throw std::runtime_error("all " + std::to_string(MarkSlots::kCapacity) +
                             " mark slots are open; close some first");
  }

  void Arm(int32_t slot, int64_t id, bool is_called_next) {
    if (!MarkSlots::Global().Arm(&queue_, slot, id, is_called_next))
      ThrowNotOpen(slot);
  }

  void CloseSlot(int32_t slot) {
    if (!MarkSlots::Global().Close(&queue_, slot)) ThrowNotOpen(slot);
  }

 private:
  std::vector<Completion> Wait(double timeout_seconds, int64_t few) {
    constexpr double kForeverSeconds = 1e9;  // 30 years: the sum stays in range
    const int64_t deadline =
        NowNanoseconds() +
        static_cast<int64_t>(std::min(timeout_seconds, kForeverSeconds) * 1e9);
    while (true) {
      {
        nb::gil_scoped_release release;
        queue_.WaitUntil(
            std::min(deadline, NowNanoseconds() + kSignalCheckNanoseconds),
            few);
      }
      // Before taking: what is queued must not be lost when a signal handler
      // raises.
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      const bool is_late = NowNanoseconds() >= deadline;
      std::vector<Completion> completions =
          is_late ? queue_.TakeAll() : queue_.TakeIfFewLeft(few);
      if (is_late || !completions.empty()) return completions;
    }
  }

  [[noreturn]] static void ThrowNotOpen(int32_t slot) {
    const std::string message =
        "slot " + std::to_string(slot) + " is not open on this queue";
    throw nb::value_error(message.c_str());
  }

  CompletionQueue queue_;
};

nb::capsule Handler(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a queue may well live until the process ends
  m.doc() = "Completion marks, the queue they wake, and what plans take.";
  nb::class_<PyQueue>(m, "CompletionQueue")
      .def(nb::init<>())
      .def_prop_ro("has_marks", [](const PyQueue&) { return true; })
      .def("push", &PyQueue::Push, nb::arg("id"))
      .def("drain", &PyQueue::Drain, nb::arg("timeout_seconds"),
           nb::arg("few") = std::numeric_limits<int64_t>::max())
      .def("open_slot", &PyQueue::OpenSlot)
      .def("arm", &PyQueue::Arm, nb::arg("slot"), nb::arg("id"),
           nb::arg("is_called_next") = false)
      .def("close_slot", &PyQueue::CloseSlot, nb::arg("slot"));
  m.def("mark_cpu", [] { return Handler(&JturnipMarkCpu); });
  m.def("mark_cuda", [] { return Handler(&JturnipMarkCuda); });
  BindPlans(m);
  // The FFI version of the headers this was compiled with.
  m.def("api_version",
        [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}

}  // namespace
}  // namespace jturnip
