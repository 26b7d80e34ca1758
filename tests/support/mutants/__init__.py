"""Drivers with one planted bug each, to prove that `moorage check` finds it.

Owns: the reference driver, which keeps every rule, the proxy that plants a bug before it, and the table of bugs.
Start reading at: `catalogue.MUTANTS`, `running.check_mutant`.
"""
