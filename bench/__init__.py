"""Benches: Antiphon against its peers, side by side on one machine.

Every figure is a ratio of two things measured in the same run, one after the other and in turns, and
the median of several pairs: an absolute number says more about the machine than about the code. Peers
run in their fastest mode. `python -m bench --help` lists the benches; docs/benchmarks.md is generated
from the stored runs in bench/runs.

The benches know servers by their command lines and HTTP only (`bench scheduler` alone imports the
engine). They are no part of the product.
"""
