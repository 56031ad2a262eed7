// Bindings for what plans take.

#ifndef JTURNIP_XLA_EXT_PLAN_BINDINGS_H_
#define JTURNIP_XLA_EXT_PLAN_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace jturnip {

void BindPlans(nanobind::module_& m);

}  // namespace jturnip

#endif  // JTURNIP_XLA_EXT_PLAN_BINDINGS_H_
