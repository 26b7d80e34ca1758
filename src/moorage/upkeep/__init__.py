"""The only tools that delete what has no owner. `insight` only reads."""
