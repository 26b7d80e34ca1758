"""The snapshot controller: VolumeSnapshots and VolumeGroupSnapshots, bound to the contents that drivers make."""
