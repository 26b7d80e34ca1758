"""The agent's HTTPS endpoint: logs, exec, figures. Start at `run.py`."""
