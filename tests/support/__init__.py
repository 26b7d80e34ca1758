"""What tests share: callers, processes, builders, waiting."""
