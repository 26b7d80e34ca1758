"""The CSI services: they translate messages and delegate."""
