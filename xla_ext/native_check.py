"""Fires a mark on the CPU, and says with which build of the extension."""

import jax
import numpy as np

from jturnip.native import marks, queue


def main() -> None:
    if not marks.load():
        raise SystemExit(marks.status().reason)
    from jturnip.native import _native

    completions = queue.make_queue()
    slot = completions.open_slot()
    completions.arm(slot, 42)
    double = jax.jit(lambda x, slot: (y := x * 2, marks.mark(y, slot)))
    double(np.ones(3, np.float32), np.int32(slot))
    [(id, _)] = completions.drain(10.0)
    assert id == 42
    print(f"a mark fired from {_native.__file__}, FFI {_native.api_version()}")


if __name__ == "__main__":
    main()
