#include "plan_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan_ops.h"
#include "plan_seconds.h"
#include "task_graph.h"
#include "task_orders.h"

namespace nb = nanobind;

namespace jturnip {
namespace {

// As jturnip/programs/twin.py gives them.
using BufferTuple = std::tuple<int64_t, int64_t, int, bool, bool>;
using TaskTuple = std::tuple<std::vector<BufferId>, std::vector<BufferId>,
                             std::vector<std::pair<int32_t, int32_t>>, int64_t,
                             double, double>;
using WindowTuple =
    std::tuple<std::vector<int32_t>, std::vector<int32_t>, int32_t, int32_t>;

TaskGraph MakeGraph(const std::vector<BufferTuple>& buffers,
                    const std::vector<TaskTuple>& tasks,
                    std::vector<BufferId> outputs) {
  TaskGraph graph;
  for (const auto& [nbytes, device_bytes, start, pinned, end_on_host] :
       buffers) {
    graph.buffers.push_back(
        {nbytes, device_bytes, static_cast<Start>(start), pinned, end_on_host});
  }
  for (const auto& [inputs, outputs, overwrites, workspace, seconds, dispatch] :
       tasks)
    graph.tasks.push_back(
        {inputs, outputs, overwrites, workspace, seconds, dispatch});
  graph.outputs = std::move(outputs);
  Check(graph);
  return graph;
}

Strategy MakeStrategy(bool serial, bool belady, bool late, int32_t ahead,
                      double spare, std::optional<WindowTuple> window,
                      std::unordered_map<int32_t, std::vector<BufferId>> leave,
                      std::unordered_map<int32_t, std::vector<Move>> come) {
  Strategy strategy{serial, belady,           late,           ahead, spare,
                    {},     std::move(leave), std::move(come)};
  if (window) {
    auto& [partitions, firsts, resident, returned] = *window;
    strategy.window =
        Window{std::move(partitions), std::move(firsts), resident, returned};
  }
  return strategy;
}

Link MakeLink(double h2d, double d2h, double latency, double issue,
              double heard, double late, bool after_compute) {
  return {{h2d, d2h}, latency, issue, heard, late, after_compute};
}

nb::tuple Times(const TaskGraph& graph, int64_t arena_bytes,
                const Strategy& strategy, const Link& link,
                const Limits& limits) {
  PlanSeconds taken;
  Moved moved;
  {
    nb::gil_scoped_release release;
    const MemGraph plan =
        MakePlan(graph, arena_bytes, strategy, link.rates, false);
    taken = Simulate(graph, plan, link, limits);
    moved = CountMoved(graph, plan);
  }
  return nb::make_tuple(taken.seconds, taken.compute_seconds, moved.copies,
                        moved.h2d_bytes, moved.d2h_bytes,
                        moved.host_peak_bytes);
}

nb::tuple ToPython(const Ranges& ranges) {
  nb::list pairs;
  for (const auto& [offset, nbytes] : ranges)
    pairs.append(nb::make_tuple(offset, nbytes));
  return nb::tuple(pairs);
}

// An op: its kind, the task of a run or the buffer, what it reads and writes,
// its workspace, and (op, why, buffer) of each that it waits for.
nb::tuple ToPython(const Op& op) {
  nb::list deps;
  for (const Dep& dep : op.deps)
    deps.append(nb::make_tuple(dep.op, static_cast<int>(dep.why), dep.buffer));
  return nb::make_tuple(
      static_cast<int>(op.kind), op.of, nb::tuple(nb::cast(op.reads)),
      nb::tuple(nb::cast(op.writes)), ToPython(op.workspace), deps);
}

nb::tuple Plan(const TaskGraph& graph, int64_t arena_bytes,
               const Strategy& strategy, double h2d, double d2h) {
  MemGraph plan;
  {
    nb::gil_scoped_release release;
    plan = MakePlan(graph, arena_bytes, strategy, {h2d, d2h}, true);
  }
  nb::list ops, instances;
  for (const Op& op : plan.ops) ops.append(ToPython(op));
  for (const Instance& i : plan.instances)
    instances.append(nb::make_tuple(i.buffer, ToPython(i.ranges), i.on_host));
  return nb::make_tuple(ops, instances,
                        nb::tuple(nb::cast(plan.inputs_at_start)),
                        nb::tuple(nb::cast(plan.outputs_at_end)));
}

}  // namespace

void BindPlans(nb::module_& m) {
  nb::class_<TaskGraph>(m, "TaskGraph")
      .def(
          "__init__",
          [](TaskGraph* self, const std::vector<BufferTuple>& buffers,
             const std::vector<TaskTuple>& tasks,
             std::vector<BufferId> outputs) {
            new (self) TaskGraph(MakeGraph(buffers, tasks, std::move(outputs)));
          },
          nb::arg("buffers"), nb::arg("tasks"), nb::arg("outputs"))
      .def("reordered", &Reordered, nb::arg("tasks"))
      .def(
          "order",
          [](const TaskGraph& graph, int64_t arena_bytes, int order) {
            const std::vector<TaskId> tasks =
                OrderTasks(graph, arena_bytes, static_cast<Order>(order));
            return nb::tuple(nb::cast(tasks));
          },
          nb::arg("arena_bytes"), nb::arg("order"));
  nb::class_<Strategy>(m, "Strategy")
      .def(
          "__init__",
          [](Strategy* self, bool serial, bool belady, bool late, int32_t ahead,
             double spare, std::optional<WindowTuple> window,
             std::unordered_map<int32_t, std::vector<BufferId>> leave,
             std::unordered_map<int32_t, std::vector<Move>> come) {
            new (self) Strategy(MakeStrategy(
                serial, belady, late, ahead, spare, std::move(window),
                std::move(leave), std::move(come)));
          },
          nb::arg("serial"), nb::arg("belady"), nb::arg("late"),
          nb::arg("ahead"), nb::arg("spare"), nb::arg("window").none(),
          nb::arg("leave"), nb::arg("come"));
  nb::class_<Link>(m, "Link").def(
      "__init__",
      [](Link* self, double h2d, double d2h, double latency, double issue,
         double heard, double late, bool after_compute) {
        new (self) Link(
            MakeLink(h2d, d2h, latency, issue, heard, late, after_compute));
      },
      nb::arg("h2d"), nb::arg("d2h"), nb::arg("latency"), nb::arg("issue"),
      nb::arg("heard"), nb::arg("late"), nb::arg("after_compute"));
  nb::class_<Limits>(m, "Limits")
      .def(
          "__init__",
          [](Limits* self, int64_t compute, int64_t h2d, int64_t d2h,
             int64_t short_runs, double queue_seconds) {
            new (self) Limits{compute, h2d, d2h, short_runs, queue_seconds};
          },
          nb::arg("compute"), nb::arg("h2d"), nb::arg("d2h"),
          nb::arg("short_runs"), nb::arg("queue_seconds"));
  m.def("plan", &Plan, nb::arg("graph"), nb::arg("arena_bytes"),
        nb::arg("strategy"), nb::arg("h2d"), nb::arg("d2h"));
  m.def("times", &Times, nb::arg("graph"), nb::arg("arena_bytes"),
        nb::arg("strategy"), nb::arg("link"), nb::arg("limits"));
}

}  // namespace jturnip
