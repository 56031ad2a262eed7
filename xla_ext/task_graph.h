// What is to be computed, as jturnip/graph/taskgraph.py has it, less what only
// people and executables need.

#ifndef JTURNIP_XLA_EXT_TASK_GRAPH_H_
#define JTURNIP_XLA_EXT_TASK_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace jturnip {

using BufferId = int32_t;
using TaskId = int32_t;

enum class Start { kWritten, kDevice, kHost };

struct Buffer {
  int64_t nbytes;        // over the link
  int64_t device_bytes;  // in the arena, padded
  Start start;           // kWritten: by a task
  bool pinned;
  bool end_on_host;
};

struct Task {
  std::vector<BufferId> inputs;   // distinct
  std::vector<BufferId> outputs;  // distinct
  // (position of an output, position of an input): the output takes over the
  // bytes of the input.
  std::vector<std::pair<int32_t, int32_t>> overwrites;
  int64_t workspace;  // padded
  double seconds;
  double dispatch_seconds;
};

// The next use of what is not read again.
constexpr int64_t kNever = int64_t{1} << 60;

// Whether an output takes over the bytes of an input.
bool IsOverwritten(const Task& task, size_t input);

// Tasks stand in a valid serial order.
struct TaskGraph {
  std::vector<Buffer> buffers;
  std::vector<Task> tasks;
  std::vector<BufferId> outputs;
};

// Arena bytes of the outputs that take bytes of their own.
int64_t NewBytes(const TaskGraph& graph, const Task& task);

// Throws std::invalid_argument where a number names no buffer or operand.
void Check(const TaskGraph& graph);

// The same with its tasks in another valid order, as `reordered` in
// jturnip/planner/orders.py: one that comes again writes copies of its results.
// Throws std::invalid_argument where a number names no task.
TaskGraph Reordered(const TaskGraph& graph, const std::vector<TaskId>& tasks);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_TASK_GRAPH_H_
