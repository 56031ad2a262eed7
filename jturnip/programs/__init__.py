"""What a function becomes in a budget, and how that is found.

| file | what it has |
| --- | --- |
| `records` | the programs: `Straight`, `Loop`, `Choice`, `Rows`, `Call`, `Chain` |
| `make` | a traced function to its program: begin here |
| `attempts` | how much is taken apart in the first attempt, and in later ones |
| `splitting` | a flat function to tasks that fit, compiled |
| `graphs` | their TaskGraph |
| `planning` | tasks to a plan |
| `chains`, `driven` | programs one after the other; loops and branches |
| `places` | where arguments, closed-over arrays and results lie, and their bytes |
| `bounds` | what a function needs at least and at most, before it is compiled |
| `devices` | what is expected of a device until it is measured |
| `refusals` | what a refusal asks for and says |
"""
