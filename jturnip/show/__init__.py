"""Records as people see them: timelines, pictures, pages for notebooks, traces, words.

| module | from | to |
| --- | --- | --- |
| `timeline` | a run and its plan | events in lanes, and memory in use |
| `slots` | a plan | who has which bytes of the arena, and when |
| `pictures` | those | SVG |
| `pages` | what a notebook shows | HTML |
| `trace` | a timeline | a file for Perfetto |
| `explain` | a plan | sentences |
"""
