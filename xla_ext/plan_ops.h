// A twin of jturnip/planner/planner.py, which says what each step is for: the
// same plan for every graph, in a part of the time. What either makes is proven
// by the verifier, in Python.

#ifndef JTURNIP_XLA_EXT_PLAN_OPS_H_
#define JTURNIP_XLA_EXT_PLAN_OPS_H_

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "task_graph.h"

namespace jturnip {

using OpId = int32_t;
using InstanceId = int32_t;

enum class OpKind : int8_t { kRun, kReload, kOffload, kDrop };

// Why an op may not start before another, as the planner's words for it.
enum class Why : int8_t {
  kData,       // it reads what the other wrote
  kWrites,     // it writes a buffer into bytes the other freed
  kReloads,    // it reloads a buffer into them
  kWorkspace,  // it uses them for workspace
  kUsedUp,     // it frees bytes after their last reader
  kLeaves,     // it frees bytes for others
  kSerial,     // the strategy keeps the simulated order
  kPartition,  // the strategy's partitions come one after the other
};

struct Dep {
  OpId op;
  Why why;
  BufferId buffer;  // of kWrites and kReloads
};

// (offset, bytes), disjoint, sorted.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;

// One stay of a buffer in one memory; without ranges on the host.
struct Instance {
  BufferId buffer;
  Ranges ranges;
  bool on_host;
};

struct Op {
  OpKind kind;
  int32_t of;  // the task of a run, else the buffer
  std::vector<InstanceId> reads;
  std::vector<InstanceId> writes;
  Ranges workspace;
  std::vector<Dep> deps;  // one for each op, sorted
};

struct MemGraph {
  std::vector<Op> ops;
  std::vector<Instance> instances;
  std::vector<InstanceId> inputs_at_start;
  std::vector<InstanceId> outputs_at_end;
};

// Which partitions of the tasks are on the device at once (planner/windows.py).
struct Window {
  std::vector<int32_t> partitions;  // of each task
  std::vector<int32_t> firsts;      // the first task of each
  int32_t resident;
  int32_t returned;
};

// (buffer, the task that reads it)
using Move = std::pair<BufferId, TaskId>;

// What planner/strategies.py has; victims and dependencies as in planner.py.
struct Strategy {
  bool serial;
  bool belady;
  bool late;
  int32_t ahead;
  double spare;
  std::optional<Window> window;
  // After which task (-1: at the start) which buffers leave; beside which task
  // which come.
  std::unordered_map<int32_t, std::vector<BufferId>> leave;
  std::unordered_map<int32_t, std::vector<Move>> come;
};

struct Rates {
  double h2d;  // bytes a second
  double d2h;
};

// Throws std::runtime_error where there is no plan in so many bytes. Ranges
// stay empty where nobody asks for addresses: nothing else depends on them.
MemGraph MakePlan(const TaskGraph& graph, int64_t arena_bytes,
                  const Strategy& strategy, const Rates& rates,
                  bool with_addresses);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_PLAN_OPS_H_
