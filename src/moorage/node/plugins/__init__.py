"""CSI drivers on this node: how they announce themselves and how the cluster hears of them. Start at `manager.py`."""
