"""The objects, in memory and in SQLite, and the log of their changes."""
