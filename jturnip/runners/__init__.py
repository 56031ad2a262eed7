"""What runs a program.

| file | what it has |
| --- | --- |
| `function` | a compiled function that is split, as a caller sees it: begin here |
| `whole` | a compiled function that fits, likewise |
| `tasks` | the event loop over one plan |
| `pieces` | loops, branches, and chains of plans |
| `failures` | what is let go after an error |
"""
