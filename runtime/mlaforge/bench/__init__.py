"""Measuring the kernels of a spec on a GPU, beside other kernels and beside what the machine can do.

`cases` says what is measured, `inputs` makes decode's tensors, `peers` are whom we compare it with; `prefill` has both
for prefill, and `memory` the calls of the kernels that move data. `timing` and `power` say how; `machine` measures what
the GPU itself can do, `session` runs it all and `roofline` shows it. `tune` compares the settings of one spec with each
other, and `tune_plot` shows that; `watchdog` notices what hangs. Importing this package imports nothing heavy.
"""
