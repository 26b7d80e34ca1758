"""Find, judge and remove objects, volumes, mounts and devices without an owner."""
