// Orders in which a plan may have the tasks: a twin of
// jturnip/planner/orders.py, which says what each step is for.

#ifndef JTURNIP_XLA_EXT_TASK_ORDERS_H_
#define JTURNIP_XLA_EXT_TASK_ORDERS_H_

#include <cstdint>
#include <vector>

#include "task_graph.h"

namespace jturnip {

// What goes first of the tasks that could run next: `ORDERS` in orders.py.
enum class Order : int8_t { kReuse, kLean };

std::vector<TaskId> OrderTasks(const TaskGraph& graph, int64_t arena_bytes,
                               Order order);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_TASK_ORDERS_H_
