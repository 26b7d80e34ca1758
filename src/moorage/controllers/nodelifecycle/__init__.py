"""Node lifecycle: marks silent nodes, taints them, evicts their pods and removes pods that cannot end by themselves."""
