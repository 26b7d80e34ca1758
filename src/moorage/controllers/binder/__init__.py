"""The binder: claims find their volumes, volumes outlive or follow their claims. Start reading at `run.py`."""
