"""Linux: mounts, loop devices, filesystems, freezing, extents, processes."""
