"""The node agent: plugin registration, the volume manager, and just enough of pods."""
