"""Measuring the decode kernels of a spec on a GPU, beside other kernels and beside what the machine can do.

`cases` says what is measured, `peers` whom we compare with, `timing` and `power` how; `machine` measures what the GPU
itself can do, `session` runs it all, `report` and `roofline` show it. Importing this package imports nothing heavy.
"""
