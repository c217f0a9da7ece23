"""Measuring the decode kernels of a spec on a GPU, beside other kernels and beside what the machine can do.

`cases` says what is measured, `inputs` makes its tensors, `peers` are whom we compare with, `timing` and `power` say
how; `machine` measures what the GPU itself can do, `session` runs it all and `roofline` shows it. `tune` compares the
settings of one spec with each other, and `tune_plot` shows that. Importing this package imports nothing heavy.
"""
