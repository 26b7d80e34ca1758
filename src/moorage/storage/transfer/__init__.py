"""Volumes as streams: export, import, and the archive format of directories."""
