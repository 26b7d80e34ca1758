"""One complete driver for each kind of storage: the examples, and what a new project begins with."""
