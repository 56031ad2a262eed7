"""jturnip: run any JAX function in a byte budget, with CPU RAM as the overflow."""

from jturnip.api import Wrapped as Wrapped, jit as jit
from jturnip.comparison import (
    BASELINES as BASELINES,
    Comparison as Comparison,
    compare as compare,
)
from jturnip.errors import (
    ArgumentError as ArgumentError,
    BudgetError as BudgetError,
    DoesNotFit as DoesNotFit,
    ExecutionError as ExecutionError,
    HostMemoryError as HostMemoryError,
    InlinedWarning as InlinedWarning,
    InternalError as InternalError,
    JTurnipError as JTurnipError,
    PlanningError as PlanningError,
    UnsupportedError as UnsupportedError,
)
from jturnip.graph.plan import Plan as Plan
from jturnip.graph.report import RunReport as RunReport
from jturnip.hardware import (
    ACCELERATORS as ACCELERATORS,
    LINKS as LINKS,
    Accelerator as Accelerator,
    HostLink as HostLink,
)
from jturnip.memory import device as device, host as host
from jturnip.runtime.link import SimulatedLink as SimulatedLink
from jturnip.stages.prediction import Prediction as Prediction
from jturnip.stock import peak_bytes as peak_bytes


__version__ = "0.1.0"
