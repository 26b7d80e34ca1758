"""The checks that moorage check runs against any CSI driver."""
