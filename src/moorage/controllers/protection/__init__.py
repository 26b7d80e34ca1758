"""Protection: claims in use, bound volumes and named attributes classes cannot vanish. Start reading at `run.py`."""
