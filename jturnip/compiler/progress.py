"""A bar for compiling that takes long."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any


# Compiling that is over sooner shows nothing.
_PATIENCE_SECONDS = 2.0
_FORMAT = "jturnip: compiling {n_fmt} of {total_fmt} tasks |{bar}| {elapsed}"


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is to be told, now and then, how many tasks are compiled.

    The bar is there only while stderr is a terminal, or in a notebook, and only where tqdm
    is installed. It is gone when the context is left, in whatever way.
    """
    bar = _make_bar(total)
    if bar is None:
        yield lambda done: None
        return
    try:
        yield lambda done: bar.update(done - bar.n)
    finally:
        if bar.format_dict["elapsed"] >= _PATIENCE_SECONDS:
            # Stopped while it drew, tqdm does not know that there is something to clear.
            bar.delay = 0
            bar.refresh()
        bar.total = bar.n  # a notebook keeps a bar that is not full
        bar.close()


def bar_class() -> Any | None:
    """tqdm's bar for a terminal or a notebook; None without tqdm, or without stderr."""
    if sys.stderr is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no ipywidgets, say
            from tqdm.auto import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        monitor_interval = 0  # no thread of tqdm's own

    Bar.set_lock(threading.RLock())  # stopped while it draws, tqdm keeps the lock
    return Bar


def _make_bar(total: int) -> Any | None:
    bar = bar_class()
    if bar is None:
        return None
    return bar(
        total=total,
        delay=_PATIENCE_SECONDS,
        miniters=0,  # the time is news too
        leave=False,
        disable=None,  # unless on a terminal or in a notebook
        dynamic_ncols=True,
        bar_format=_FORMAT,
    )
