"""Explain and trace: why a volume is where it is, and what happened to it."""
