#include "task_graph.h"

#include <cstddef>
#include <stdexcept>

namespace jturnip {

namespace {

bool Names(const std::vector<BufferId>& buffers, size_t count) {
  for (BufferId b : buffers) {
    if (b < 0 || static_cast<size_t>(b) >= count) return false;
  }
  return true;
}

bool IsPosition(int32_t at, const std::vector<BufferId>& among) {
  return at >= 0 && static_cast<size_t>(at) < among.size();
}

}  // namespace

bool IsOverwritten(const Task& task, size_t input) {
  for (const auto& [o, i] : task.overwrites)
    if (static_cast<size_t>(i) == input) return true;
  return false;
}

int64_t NewBytes(const TaskGraph& graph, const Task& task) {
  const auto size = [&](BufferId b) { return graph.buffers[b].device_bytes; };
  int64_t nbytes = 0;
  for (BufferId b : task.outputs) nbytes += size(b);
  for (const auto& [o, i] : task.overwrites) nbytes -= size(task.outputs[o]);
  return nbytes;
}

void Check(const TaskGraph& graph) {
  const size_t count = graph.buffers.size();
  bool is_valid = Names(graph.outputs, count);
  for (const Task& task : graph.tasks) {
    is_valid = is_valid && Names(task.inputs, count);
    is_valid = is_valid && Names(task.outputs, count);
    for (const auto& [o, i] : task.overwrites) {
      is_valid = is_valid && IsPosition(o, task.outputs);
      is_valid = is_valid && IsPosition(i, task.inputs);
    }
  }
  if (!is_valid) throw std::invalid_argument("no such buffer");
}

TaskGraph Reordered(const TaskGraph& graph, const std::vector<TaskId>& tasks) {
  TaskGraph result;
  result.buffers = graph.buffers;
  result.outputs = graph.outputs;
  result.tasks.reserve(tasks.size());
  std::vector<BufferId> latest(graph.buffers.size());
  for (size_t b = 0; b < latest.size(); ++b)
    latest[b] = static_cast<BufferId>(b);
  std::vector<bool> ran(graph.tasks.size(), false);
  for (TaskId t : tasks) {
    if (t < 0 || static_cast<size_t>(t) >= graph.tasks.size())
      throw std::invalid_argument("no such task");
    Task task = graph.tasks[t];
    for (BufferId& b : task.inputs) b = latest[b];
    for (BufferId& b : task.outputs) {
      if (ran[t]) {
        latest[b] = static_cast<BufferId>(result.buffers.size());
        Buffer copy = graph.buffers[b];
        copy.end_on_host = false;
        result.buffers.push_back(copy);
      }
      b = latest[b];
    }
    ran[t] = true;
    result.tasks.push_back(std::move(task));
  }
  return result;
}

}  // namespace jturnip
