"""Every part on one machine: moorage up."""
