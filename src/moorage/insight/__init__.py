"""Explain and trace: why a volume is where it is, and what happened to it.

Owns: the table of causes and the reading of a cluster that they need. Everything here only reads.
May not touch: writes of any kind; terminals (the command line prints).
Start reading at: `explain.explain`, `causes.model.cause`, `trace.trace`.
"""
