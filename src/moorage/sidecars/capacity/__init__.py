"""The capacity publisher: how much room there is where, for the scheduler. Start at: `run.CapacityPublisher`."""
