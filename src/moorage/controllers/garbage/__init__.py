"""The garbage collector: what no owner is left for goes; owners wait, or let go, as asked. Start at `run.py`."""
