"""The stages of a jturnip function, after `jax.stages`: Traced, Lowered, Compiled.

| stage | holds | allocates |
| --- | --- | --- |
| Traced | the jaxpr | nothing |
| Lowered | the flat function; `plan` when first asked for | nothing |
| Compiled | a program that can be called | what measuring its tasks takes, for a moment |
"""

from jturnip.stages.compiled import Compiled as Compiled
from jturnip.stages.lowered import Lowered as Lowered
from jturnip.stages.options import Options as Options, Part as Part, placed as placed
from jturnip.stages.traced import Traced as Traced, anywhere as anywhere
