// What the ops of a plan take: twins of jturnip/runtime/schedule.py, state.py
// and simulated.py, which say of every op when it runs. These say when all is
// over.

#ifndef JTURNIP_XLA_EXT_PLAN_SECONDS_H_
#define JTURNIP_XLA_EXT_PLAN_SECONDS_H_

#include <cstdint>

#include "plan_ops.h"
#include "task_graph.h"

namespace jturnip {

// What the transfer engines are expected to do, as in runtime/schedule.py.
struct Link {
  Rates rates;
  double latency_seconds;
  double issue_seconds;
  double heard_seconds;
  double late_seconds;
  bool after_compute;
};

// How many ops each engine may hold at a time, as in runtime/state.py.
struct Limits {
  int64_t compute;
  int64_t h2d;
  int64_t d2h;
  int64_t short_runs;
  double queue_seconds;
};

struct PlanSeconds {
  double seconds;          // from the first instruction to the last completion
  double compute_seconds;  // the sum of the runs' own times
};

// Where copies take nothing from the computing beside them. Throws
// std::runtime_error where ops are left that can never start.
PlanSeconds Simulate(const TaskGraph& graph, const MemGraph& plan,
                     const Link& link, const Limits& limits);

struct Moved {
  int64_t copies;  // of more than no bytes
  int64_t h2d_bytes;
  int64_t d2h_bytes;
  // The most bytes of host memory that what left takes, as
  // jturnip/planner/figures.py has it.
  int64_t host_peak_bytes;
};

Moved CountMoved(const TaskGraph& graph, const MemGraph& plan);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_PLAN_SECONDS_H_
