"""`multigate repro`: the paper's table and what it leaves open, run again with seeds and intervals.

A *cell* is one thing to train, a *run* a cell with a seed, a *study* a list of cells and how they
are grouped into tables. Runs are trained by `multigate.train`, each in a process of its own; what
should be published of a run is kept in --out, and every table is made from there alone.
"""
