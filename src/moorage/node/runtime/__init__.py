"""Runs containers as processes in their own namespaces."""
