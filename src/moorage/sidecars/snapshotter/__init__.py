"""The snapshotter: contents become snapshots at the driver, one by one and in groups. Start: `run.Snapshotter`."""
