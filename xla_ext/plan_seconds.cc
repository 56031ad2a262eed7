#include "plan_seconds.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <stdexcept>
#include <utility>
#include <vector>

namespace jturnip {

namespace {

// Engines, by OpKind; a drop needs none.
constexpr size_t kCompute = static_cast<size_t>(OpKind::kRun);
constexpr size_t kToDevice = static_cast<size_t>(OpKind::kReload);
constexpr size_t kToHost = static_cast<size_t>(OpKind::kOffload);

template <typename T>
using MinHeap = std::priority_queue<T, std::vector<T>, std::greater<T>>;

template <typename T>
T Pop(MinHeap<T>& heap) {
  T top = heap.top();
  heap.pop();
  return top;
}

// The loop on a virtual clock.
class Simulation {
 public:
  Simulation(const TaskGraph& graph, const MemGraph& plan, const Link& link,
             const Limits& limits)
      : graph_(graph), ops_(plan.ops), link_(link), limits_(limits) {
    const size_t count = ops_.size();
    waits_.resize(count);
    over_.assign(count, 0.0);
    seconds_.resize(count);
    // The ops that wait for each, one after the other.
    successors_begin_.assign(count + 1, 0);
    for (const Op& op : ops_)
      for (const Dep& dep : op.deps) ++successors_begin_[dep.op + 1];
    for (size_t i = 0; i < count; ++i)
      successors_begin_[i + 1] += successors_begin_[i];
    successors_.resize(successors_begin_[count]);
    std::vector<int32_t> filled(successors_begin_.begin(),
                                successors_begin_.end());
    for (size_t i = 0; i < count; ++i) {
      const Op& op = ops_[i];
      waits_[i] = static_cast<int32_t>(op.deps.size());
      for (const Dep& dep : op.deps)
        successors_[filled[dep.op]++] = static_cast<OpId>(i);
      seconds_[i] = Seconds(op);
    }
    places_[kCompute] = std::max(limits.compute, limits.short_runs);
    places_[kToDevice] = limits.h2d;
    places_[kToHost] = limits.d2h;
  }

  PlanSeconds Run() {
    size_t remaining = ops_.size();
    for (size_t i = 0; i < ops_.size(); ++i)
      if (waits_[i] == 0) MakeReady(static_cast<OpId>(i));
    Advance(remaining);
    std::vector<std::pair<double, OpId>> done;
    while (remaining > 0) {
      if (events_.empty()) throw std::runtime_error("ops can never start");
      Wait(done);
      for (const auto& [end, op] : done) {
        const size_t engine = Engine(op);
        ends_ = std::max(ends_, end);
        ++places_[engine];
        --remaining;
        if (engine == kCompute) {
          --computing_;
          queued_seconds_ -= seconds_[op];
        } else {
          Satisfy(op);
        }
      }
      Advance(remaining);
    }
    // A run begins when the one before is over, and it was started.
    double compute = 0.0, free = 0.0;
    for (const auto& [start, end] : runs_) {
      const double begin = std::max(start, free);
      free = std::max(end, begin);
      compute += free - begin;
    }
    return {ends_, compute};
  }

 private:
  size_t Engine(OpId op) const { return static_cast<size_t>(ops_[op].kind); }

  double Seconds(const Op& op) const {
    const auto nbytes = [&] {
      return static_cast<double>(graph_.buffers[op.of].nbytes);
    };
    switch (op.kind) {
      case OpKind::kRun:
        return graph_.tasks[op.of].seconds;
      case OpKind::kReload:
        return nbytes() / link_.rates.h2d;
      case OpKind::kOffload:
        return nbytes() / link_.rates.d2h;
      default:
        return 0.0;
    }
  }

  // The state machine: drops first, then transfers, then one run.

  void Advance(size_t& remaining) {
    std::vector<OpId> started;
    while (true) {
      while (!drops_.empty()) {
        const OpId op = drops_.back();
        drops_.pop_back();
        started.push_back(op);
        --remaining;
        Satisfy(op);
      }
      for (size_t engine : {kToHost, kToDevice}) {
        while (!ready_[engine].empty() && places_[engine] > 0) {
          --places_[engine];
          started.push_back(Pop(ready_[engine]));
        }
      }
      if (ready_[kCompute].empty() || places_[kCompute] == 0) break;
      const OpId op = ready_[kCompute].top();
      if (!MayBeQueued(op)) break;
      ready_[kCompute].pop();
      --places_[kCompute];
      started.push_back(op);
      ++computing_;
      queued_seconds_ += seconds_[op];
      Satisfy(op);
    }
    for (OpId op : started) Start(op);
  }

  bool MayBeQueued(OpId run) const {
    return computing_ < limits_.compute ||
           queued_seconds_ + seconds_[run] <= limits_.queue_seconds;
  }

  void Satisfy(OpId op) {
    for (int32_t at = successors_begin_[op]; at < successors_begin_[op + 1];
         ++at)
      if (--waits_[successors_[at]] == 0) MakeReady(successors_[at]);
  }

  void MakeReady(OpId op) {
    if (ops_[op].kind == OpKind::kDrop) {
      drops_.push_back(op);
    } else {
      ready_[Engine(op)].push(op);
    }
  }

  // The engines.

  void Start(OpId op) {
    double end = over_[op];
    const size_t engine = Engine(op);
    if (ops_[op].kind == OpKind::kRun) {
      const double dispatch = graph_.tasks[ops_[op].of].dispatch_seconds;
      const double started = now_;
      const double begin = std::max({now_, free_[kCompute], end});
      if (begin == now_ || dispatch < seconds_[op]) now_ += dispatch;
      end = free_[kCompute] = begin + seconds_[op];
      runs_.emplace_back(started, end);
    } else if (ops_[op].kind != OpKind::kDrop) {
      now_ += link_.issue_seconds;
      double begin = std::max({now_, free_[engine], end});
      if (link_.after_compute) begin = std::max(begin, free_[kCompute]);
      end = free_[engine] = begin + seconds_[op];
      end += link_.latency_seconds;
    }
    if (ops_[op].kind != OpKind::kDrop) events_.push({end, op});
    for (int32_t at = successors_begin_[op]; at < successors_begin_[op + 1];
         ++at)
      over_[successors_[at]] = std::max(over_[successors_[at]], end);
  }

  void Wait(std::vector<std::pair<double, OpId>>& done) {
    done.clear();
    const double first = events_.top().first;
    // A core is free at the latest when there is nothing to compute.
    const double late = std::min(first + link_.late_seconds, free_[kCompute]);
    now_ = std::max({now_, first, late});
    while (!events_.empty() && events_.top().first <= now_)
      done.push_back(Pop(events_));
    now_ += static_cast<double>(done.size()) * link_.heard_seconds;
  }

  const TaskGraph& graph_;
  const std::vector<Op>& ops_;
  const Link link_;
  const Limits limits_;
  std::vector<int32_t> waits_;  // unsatisfied dependencies of each op
  std::vector<int32_t> successors_begin_;
  std::vector<OpId> successors_;
  std::vector<double> seconds_;
  std::vector<double> over_;  // when all that an op waits for is over
  MinHeap<OpId> ready_[3];
  std::vector<OpId> drops_;
  int64_t places_[3];
  int64_t computing_ = 0;
  double queued_seconds_ = 0.0;
  double now_ = 0.0;
  double free_[3] = {0.0, 0.0, 0.0};
  double ends_ = 0.0;
  MinHeap<std::pair<double, OpId>> events_;
  std::vector<std::pair<double, double>>
      runs_;  // when each was started, and is over
};

}  // namespace

PlanSeconds Simulate(const TaskGraph& graph, const MemGraph& plan,
                     const Link& link, const Limits& limits) {
  return Simulation(graph, plan, link, limits).Run();
}

Moved CountMoved(const TaskGraph& graph, const MemGraph& plan) {
  // Of each copy on the host.
  std::vector<OpId> last_read(plan.instances.size(), -1);
  std::vector<bool> is_ours(plan.instances.size(), false);
  std::vector<bool> is_kept(plan.instances.size(), false);
  for (InstanceId i : plan.outputs_at_end) is_kept[i] = true;
  const auto count = static_cast<OpId>(plan.ops.size());
  for (OpId at = 0; at < count; ++at)
    if (plan.ops[at].kind == OpKind::kReload)
      last_read[plan.ops[at].reads[0]] = at;
  Moved moved{0, 0, 0, 0};
  int64_t live = 0;
  for (OpId at = 0; at < count; ++at) {
    const Op& op = plan.ops[at];
    if (op.kind != OpKind::kOffload && op.kind != OpKind::kReload) continue;
    const int64_t nbytes = graph.buffers[op.of].nbytes;
    moved.copies += nbytes > 0;
    if (op.kind == OpKind::kOffload) {
      moved.d2h_bytes += nbytes;
      is_ours[op.writes[0]] = true;
      live += nbytes;
      moved.host_peak_bytes = std::max(moved.host_peak_bytes, live);
    } else {
      moved.h2d_bytes += nbytes;
      const InstanceId copy = op.reads[0];
      if (is_ours[copy] && !is_kept[copy] && last_read[copy] == at)
        live -= nbytes;
    }
  }
  return moved;
}

}  // namespace jturnip
