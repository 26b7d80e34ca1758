"""Pods as processes of this machine. Start at `run.py`."""
