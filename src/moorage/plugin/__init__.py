"""The CSI plugin: identity, controller, group controller, snapshot metadata and node services."""
