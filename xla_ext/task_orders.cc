#include "task_orders.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <queue>
#include <set>
#include <utility>

namespace jturnip {

namespace {

constexpr size_t kLookedAt = 64;  // of the tasks that could run next

// The tasks that wait for each task, and how many each waits for.
struct Dependencies {
  std::vector<std::vector<TaskId>> followers;
  std::vector<int32_t> waits;
};

Dependencies FindDependencies(const TaskGraph& graph) {
  const auto count = static_cast<TaskId>(graph.tasks.size());
  constexpr TaskId kNobody = -1;
  std::vector<TaskId> writer(graph.buffers.size(), kNobody);
  std::vector<std::vector<TaskId>> readers(graph.buffers.size());
  for (TaskId t = 0; t < count; ++t) {
    for (BufferId b : graph.tasks[t].outputs) writer[b] = t;
    for (BufferId b : graph.tasks[t].inputs) readers[b].push_back(t);
  }
  Dependencies found{std::vector<std::vector<TaskId>>(count),
                     std::vector<int32_t>(count)};
  for (TaskId t = 0; t < count; ++t) {
    const Task& task = graph.tasks[t];
    std::set<TaskId> before;
    for (BufferId b : task.inputs)
      if (writer[b] != kNobody) before.insert(writer[b]);
    // Who reads what is written over comes first.
    for (const auto& [o, i] : task.overwrites)
      for (TaskId reader : readers[task.inputs[i]])
        if (reader != t) before.insert(reader);
    for (TaskId earlier : before) found.followers[earlier].push_back(t);
    found.waits[t] = static_cast<int32_t>(before.size());
  }
  return found;
}

class Scheduler {
 public:
  Scheduler(const TaskGraph& graph, int64_t arena_bytes)
      : graph_(graph),
        arena_bytes_(arena_bytes),
        there_(graph.buffers.size(), false),
        is_needed_(graph.buffers.size(), false),
        readers_(graph.buffers.size()),
        scores_(graph.tasks.size()) {
    for (auto t = static_cast<TaskId>(graph.tasks.size()); t-- > 0;)
      for (BufferId b : graph.tasks[t].inputs) readers_[b].push_back(t);
    for (BufferId b : graph.outputs)
      is_needed_[b] = !graph.buffers[b].end_on_host;
    const auto buffers = static_cast<BufferId>(graph.buffers.size());
    for (BufferId b = 0; b < buffers; ++b) {
      if (graph.buffers[b].pinned) is_needed_[b] = true;
      if (graph.buffers[b].start != Start::kDevice) continue;
      there_[b] = true;
      used_ += Size(b);
      OfferAsVictim(b);
    }
  }

  std::vector<TaskId> Run(Order order) {
    Dependencies dependencies = FindDependencies(graph_);
    std::vector<TaskId> ready, chosen;
    for (size_t t = 0; t < graph_.tasks.size(); ++t)
      if (dependencies.waits[t] == 0) ready.push_back(static_cast<TaskId>(t));
    while (!ready.empty()) {
      const auto next =
          ready.begin() + (ready.size() > 1 ? Best(ready, order) : 0);
      const TaskId t = *next;
      ready.erase(next);
      chosen.push_back(t);
      RunTask(t);
      for (TaskId follower : dependencies.followers[t]) {
        if (--dependencies.waits[follower] > 0) continue;
        ready.insert(std::upper_bound(ready.begin(), ready.end(), follower),
                     follower);
      }
    }
    return chosen;
  }

 private:
  using Victim = std::pair<int64_t, BufferId>;  // the smallest leaves first

  // The first with the smallest score, of those that are looked at.
  std::ptrdiff_t Best(const std::vector<TaskId>& ready, Order order) {
    size_t best = 0;
    const size_t looked_at = std::min(ready.size(), kLookedAt);
    for (size_t at = 0; at < looked_at; ++at)
      if (Score(ready[at], order) < Score(ready[best], order)) best = at;
    return static_cast<std::ptrdiff_t>(best);
  }

  int64_t Score(TaskId t, Order order) {
    std::optional<int64_t>& score = scores_[t];
    if (score) return *score;
    const Task& task = graph_.tasks[t];
    int64_t nbytes = 0;
    for (BufferId b : task.inputs)
      if (!there_[b]) nbytes += Size(b);
    if (order == Order::kLean) {
      nbytes += NewBytes(graph_, task);
      for (size_t i = 0; i < task.inputs.size(); ++i) {
        const BufferId b = task.inputs[i];
        const bool is_last = readers_[b].size() <= 1 && !is_needed_[b];
        if (is_last && !IsOverwritten(task, i)) nbytes -= Size(b);
      }
    }
    score = nbytes;
    return nbytes;
  }

  // Forgets the scores of what reads a buffer.
  void Changed(BufferId b) {
    for (TaskId t : readers_[b]) scores_[t].reset();
  }

  void RunTask(TaskId t) {
    const Task& task = graph_.tasks[t];
    std::vector<bool> arrives(task.inputs.size(), false);
    int64_t nbytes = NewBytes(graph_, task);
    for (size_t i = 0; i < task.inputs.size(); ++i) {
      arrives[i] = !there_[task.inputs[i]];
      if (arrives[i]) nbytes += Size(task.inputs[i]);
    }
    MakeRoom(nbytes + task.workspace, task.inputs);
    for (BufferId b : task.inputs) there_[b] = true;
    for (BufferId b : task.outputs) there_[b] = true;
    used_ += nbytes;
    for (const auto& [o, i] : task.overwrites) there_[task.inputs[i]] = false;
    for (size_t i = 0; i < task.inputs.size(); ++i) {
      const BufferId b = task.inputs[i];
      std::vector<TaskId>& readers = readers_[b];
      readers.erase(std::find(readers.begin(), readers.end(), t));
      if (arrives[i] || readers.size() == 1) Changed(b);
    }
    for (BufferId b : task.inputs) AfterRun(b);
    for (BufferId b : task.outputs) AfterRun(b);
  }

  void AfterRun(BufferId b) {
    if (!there_[b] || graph_.buffers[b].pinned) return;
    if (!readers_[b].empty() || is_needed_[b]) {
      OfferAsVictim(b);
    } else {
      Leave(b);
    }
  }

  void MakeRoom(int64_t nbytes, const std::vector<BufferId>& keep) {
    std::vector<Victim> kept;
    while (used_ + nbytes > arena_bytes_ && !victims_.empty()) {
      const Victim victim = victims_.top();
      victims_.pop();
      const BufferId b = victim.second;
      if (!there_[b] || victim != AsVictim(b)) continue;
      if (std::find(keep.begin(), keep.end(), b) != keep.end()) {
        kept.push_back(victim);
      } else {
        Leave(b);
      }
    }
    for (const Victim& victim : kept) victims_.push(victim);
  }

  void Leave(BufferId b) {
    there_[b] = false;
    used_ -= Size(b);
    Changed(b);
  }

  void OfferAsVictim(BufferId b) {
    if (!graph_.buffers[b].pinned) victims_.push(AsVictim(b));
  }

  Victim AsVictim(BufferId b) const {
    return {-(readers_[b].empty() ? kNever : readers_[b].back()), b};
  }

  int64_t Size(BufferId b) const { return graph_.buffers[b].device_bytes; }

  const TaskGraph& graph_;
  const int64_t arena_bytes_;
  std::vector<bool> there_;
  std::vector<bool> is_needed_;  // nobody's last reading frees it
  std::vector<std::vector<TaskId>>
      readers_;  // that have not run, the first last
  int64_t used_ = 0;
  std::vector<std::optional<int64_t>> scores_;  // as far as they are known
  std::priority_queue<Victim, std::vector<Victim>, std::greater<Victim>>
      victims_;
};

}  // namespace

std::vector<TaskId> OrderTasks(const TaskGraph& graph, int64_t arena_bytes,
                               Order order) {
  return Scheduler(graph, arena_bytes).Run(order);
}

}  // namespace jturnip
