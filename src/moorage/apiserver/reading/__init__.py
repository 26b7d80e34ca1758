"""Watches and tables: how stored objects reach a client."""
