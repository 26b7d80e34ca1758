"""The built-in kinds: registry, schemas, metadata and the rules for each kind."""
