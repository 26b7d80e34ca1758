"""The volume manager: which volumes pods need, which are there, and the steps between. Start at `run.py`."""
