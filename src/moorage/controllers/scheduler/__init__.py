"""The scheduler: pods are put on nodes that have room for them and can reach their volumes."""
